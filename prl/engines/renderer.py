"""Renderers of the `renderers` package: messages to tokens and back.

The only place that touches what that package keeps private. Written for renderers 0.1.12.
"""

import base64
import contextlib
import hashlib
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import msgspec

from prl.base.errors import ConfigError
from prl.base.text import in_one_line
from prl.rollouts.images import digests_in
from prl.rollouts.inputs import ModelInput, Picture

if TYPE_CHECKING:
    from renderers import RenderedTokens, Renderer
    from renderers.base import MultiModalData
    from renderers.configs import BaseRendererConfig
    from transformers import PreTrainedTokenizerBase

    from prl.engines.pictures import PictureProcessor

PICTURE = "pixel_values"
"""Key of a picture among the package's items: one of its renderers takes it for what the model's processor made."""
HARMONY_FOLDER, HARMONY_FILE = "TIKTOKEN_ENCODINGS_BASE", "o200k_base.tiktoken"
"""Vocabulary of gpt-oss's renderer: the variable that names a folder, and the file in it."""


@dataclass
class RendererConfig:
    """A renderer, which turns messages into tokens. Further keys are its own: +renderer.thinking_retention=all."""

    _target_: str = "prl.engines.renderer.make_renderer"
    _partial_: bool = True
    name: str = "auto"
    """A renderer of the package, e.g. qwen3; `auto` = `model.renderer`, else by the tokenizer's name."""


def renderer_config(
    name: str, settings: dict[str, Any], *, where: str = "renderer", name_key: str | None = None
) -> "BaseRendererConfig":
    """The package's own config of a renderer; arguments as of `make_renderer`. Raises ConfigError naming the key."""
    from pydantic import TypeAdapter, ValidationError
    from renderers import RendererConfig

    try:
        return TypeAdapter(RendererConfig).validate_python({"name": name, **settings})
    except ValidationError as error:
        problem = error.errors()[0]
        setting = ".".join(str(part) for part in problem["loc"][1:]) or ("import_path" if name == "custom" else "")
        key = f"{where}.{setting}" if setting else name_key or f"{where}.name"
        raise ConfigError(f"{key}: {problem['msg']}") from error
    except (ImportError, OSError, TypeError) as error:  # renderer=custom: the package imports the class here
        raise ConfigError(f"{where}.import_path: {error}") from error


def make_renderer(
    tokenizer: "PreTrainedTokenizerBase",
    *,
    name: str = "auto",
    where: str = "renderer",
    name_key: str | None = None,
    pictures: "PictureProcessor | None" = None,
    **settings: str | int | float | None,
) -> "Renderer":
    """The renderer `name` over `tokenizer`.

    Args:
        tokenizer: The model's.
        name: One of `conf/renderer`.
        where: The config key of the renderer's node, for messages.
        name_key: The config key that chose the name, where that is not `<where>.name`.
        pictures: Of a model that sees.
        settings: The renderer's own settings.

    Raises:
        ConfigError: For an unknown name or setting, and for a renderer that does not fit the tokenizer.
    """
    from renderers import create_renderer
    from renderers.base import MODEL_RENDERER_MAP
    from renderers.default import DefaultRenderer

    from prl.engines.template import TemplateRenderer, with_declared_ends  # importing the package takes seconds
    from prl.engines.tokenizers import Remembering

    key = name_key or f"{where}.name"
    if pictures is not None and name == "auto":  # the package takes a model's own template for one without pictures
        name = MODEL_RENDERER_MAP.get(tokenizer.name_or_path, "default")
    is_harmony = "gpt-oss" in (name, MODEL_RENDERER_MAP.get(tokenizer.name_or_path))
    try:
        with harmony_vocabulary(tokenizer) if is_harmony else contextlib.nullcontext():
            own = tokenizer if name == "custom" else Remembering(tokenizer)
            renderer = create_renderer(own, renderer_config(name, settings, where=where, name_key=key))
        if pictures is not None:
            from prl.engines.pictures import PictureTemplateRenderer, seeing  # text runs have none

            if type(renderer) is DefaultRenderer:
                return PictureTemplateRenderer(tokenizer, renderer.config, pictures)
            renderer = seeing(renderer, own, pictures)
        if type(renderer) is DefaultRenderer:
            return TemplateRenderer(tokenizer, renderer.config)
        return renderer if name == "custom" else with_declared_ends(renderer, tokenizer)
    except (AssertionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{key}={name} does not fit this model's tokenizer: {error}") from error


@contextlib.contextmanager
def harmony_vocabulary(tokenizer: "PreTrainedTokenizerBase") -> Iterator[None]:
    """Have gpt-oss's renderer find the vocabulary, which it would download, in the model's own tokenizer.

    It checks a hash of the file, so that it refuses another tokenizer's. Raises ValueError then.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    tokens = tokenizer.get_vocab().items() - tokenizer.get_added_vocab().items()
    before = {name: value for name, value in os.environ.items() if name == HARMONY_FOLDER}
    with TemporaryDirectory() as folder:
        with (Path(folder) / HARMONY_FILE).open("wb") as file:
            for token, number in sorted(tokens, key=lambda entry: entry[1]):
                text = bytes(byte_of.get(letter, 0) for letter in token)
                file.write(base64.b64encode(text) + f" {number}\n".encode())
        os.environ[HARMONY_FOLDER] = folder
        try:
            yield
        except RuntimeError as error:
            raise ValueError(f"its vocabulary is not that of gpt-oss ({error})") from error
        finally:
            del os.environ[HARMONY_FOLDER]
            os.environ.update(before)


def call_id(prompt_ids: Sequence[int], number: int) -> str:
    """The id of a tool call: nine letters and digits, as Mistral's templates want, of which no conversation has two.

    Args:
        prompt_ids: The prompt of the reply that makes the call; it is longer in each later turn.
        number: The call's place in the reply.
    """
    return hashlib.blake2b(array("I", [number, *prompt_ids]).tobytes()).hexdigest()[:9]


class UnrenderablePrompt(ValueError):
    """A conversation that has no prompt in the model's chat template."""

    kind = "env"


def render_prompt(
    renderer: "Renderer", messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
) -> "RenderedTokens":
    """Render a conversation up to where the model's reply begins.

    Args:
        renderer: Of the model.
        messages: In OpenAI's format.
        tools: What the model may call, in OpenAI's format.

    Raises:
        UnrenderablePrompt: There is no message, or the assistant has the last word, or the template refuses them.
    """
    if not messages:
        raise UnrenderablePrompt("the conversation has no message")
    if messages[-1].get("role") == "assistant":
        raise UnrenderablePrompt("the conversation ends with the assistant's words: leave them to the model")
    return render(renderer, messages, tools, add_generation_prompt=True)


def render(
    renderer: "Renderer",
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = False,
) -> "RenderedTokens":
    """Render a conversation. Raises UnrenderablePrompt where the template refuses it."""
    try:
        rendered = renderer.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
    except UnrenderablePrompt:
        raise
    except Exception as error:  # of a chat template, which is a program, or of a renderer of the user's own
        raise UnrenderablePrompt(
            f"the renderer cannot render the conversation ({type(error).__name__}: {in_one_line(error)})"
        ) from error
    count, shown = len(digests_in(messages)), len(pictures_in(rendered))
    if count != shown:
        raise UnrenderablePrompt(f"the renderer shows {shown} of {count} pictures: choose one that shows them")
    return rendered


def input_of(rendered: "RenderedTokens") -> ModelInput:
    """Return a rendered prompt as a model reads it."""
    return ModelInput(list(rendered.token_ids), pictures_in(rendered))


def pictures_in(rendered: "RenderedTokens") -> tuple[Picture, ...]:
    """Return the pictures in a rendered prompt."""
    data = rendered.multi_modal_data
    if data is None:
        return ()
    items = zip(data.mm_placeholders["image"], data.mm_items["image"], strict=True)
    return tuple(msgspec.structs.replace(item[PICTURE], start=at.offset, length=at.length) for at, item in items)


def multi_modal(pictures: Sequence[Picture]) -> "MultiModalData | None":
    """Return the pictures of a prompt as the package has them; None for none. `pictures_in` reads them."""
    if not pictures:
        return None
    from renderers.base import MultiModalData, PlaceholderRange

    return MultiModalData(
        mm_hashes={"image": [picture.digest for picture in pictures]},
        mm_placeholders={"image": [PlaceholderRange(picture.start, picture.length) for picture in pictures]},
        mm_items={"image": [{PICTURE: picture} for picture in pictures]},
    )


def tokenizer_of(renderer: "Renderer") -> "PreTrainedTokenizerBase | None":
    """The tokenizer that a renderer was made with; None for a renderer of the user's own that does not keep it.

    The package's protocol has no attribute for it; all of its renderers keep it under the second name, prl's own under
    the first.
    """
    return getattr(renderer, "tokenizer", getattr(renderer, "_tokenizer", None))


def placeholders_of(renderer: "Renderer") -> frozenset[int]:
    """The tokens that stand for pictures, which no text may have; none for a renderer that shows no pictures."""
    processor = getattr(renderer, "pictures", None)
    return frozenset() if processor is None else processor.placeholders
