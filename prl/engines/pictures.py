"""Pictures in prompts: what a model's own processor makes of them, and the renderers that put it into a prompt.

The processor is transformers' with Pillow, whatever else is installed, so that a picture has the same features on every
machine. Its video part is left out: it wants torchvision, and no video is shown.
"""

import contextlib
import functools
import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy
from PIL import Image
from renderers.base import RenderedTokens, Renderer, is_multimodal
from renderers.configs import DefaultRendererConfig

from prl.base.errors import ConfigError
from prl.base.text import in_one_line
from prl.config.schema import ModelConfig
from prl.engines.renderer import PICTURE, UnrenderablePrompt, multi_modal, pictures_in
from prl.engines.template import PROBE, TemplateRenderer
from prl.engines.template_check import texts_of
from prl.engines.tokenizers import Remembering
from prl.rollouts.images import digest_in, digests_in, is_picture
from prl.rollouts.inputs import Picture
from prl.rollouts.pictures import MAX_PIXELS, PictureStore

MODALITIES = ("image", "video", "audio")
PROBED = [(20, 20), (300, 3000), (4000, 3000), (10_000, 8000)]
"""Heights and widths of pictures, in pixels, by whose tokens processors are compared."""


@dataclass(frozen=True)
class Seen:
    """A picture as a model reads it."""

    packed: bytes
    """What the processor writes in place of the picture's mark, compressed: it repeats a word for each token."""
    picture: Picture
    """With `start` counted from the beginning of that text."""

    @property
    def text(self) -> str:
        """The words that the processor writes."""
        return zlib.decompress(self.packed).decode()


class PictureProcessor:
    """Makes what a model reads of the pictures in a store, once for each, with the model's processor."""

    def __init__(self, path: str, tokenizer: Any, store: PictureStore, trust_remote_code: bool = False):
        """Raises ConfigError for a model whose pictures prl cannot make tokens of."""
        self.store = store
        self.tokenizer = tokenizer
        self.seen = functools.cache(self._process)
        """Returns what the model reads of the store's picture of a digest. Raises UnrenderablePrompt."""
        try:
            self.processor = processor_of(path, tokenizer, trust_remote_code)
            self.mark: str = self.processor.image_token
            [self.placeholder] = self.processor.image_token_ids
        except Exception as error:  # of transformers, of the hub, or a file that is missing
            problem = f"no processor of pictures can be made ({in_one_line(error)})"
            raise ConfigError(f"model.path={path!r}: {problem}") from error
        every = itertools.chain(*(getattr(self.processor, f"{kind}_token_ids") for kind in MODALITIES))
        self.placeholders = frozenset(token for token in every if token is not None)

    def _process(self, digest: str) -> Seen:
        options = getattr(self.processor.valid_processor_kwargs, "_defaults", {}).get("images_kwargs", {})
        try:
            image = self.store.image(digest)
            made = self.processor.image_processor(images=[image], return_tensors="np", **options)
        except ValueError as error:  # Qwen's processor takes none that is 200 times as long as wide
            raise UnrenderablePrompt(f"the picture {digest[:12]} cannot be shown: {in_one_line(error)}") from error
        text = self.processor.replace_image_token(made, image_idx=0)
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        places = [place for place, token in enumerate(token_ids) if token == self.placeholder]
        if not places or places[-1] - places[0] + 1 != len(places):
            raise UnrenderablePrompt("the model's processor cuts pictures into tiles, which prl does not show")
        names = made.keys() - set(getattr(self.processor, "unused_input_names", ()))
        features = {name: numpy.ascontiguousarray(made[name]) for name in names}
        hashed = self.store.keep_features(digest, features)
        return Seen(
            zlib.compress(text.encode()), Picture(places[0], len(places), digest, image.width, image.height, hashed)
        )

    def count(self, digests: Sequence[str]) -> int:
        """Return the number of placeholder tokens of pictures, by their sizes alone.

        Raises UnrenderablePrompt for a size that the model's processor refuses.
        """
        sizes = [self.store.sizes[digest][::-1] for digest in digests]
        try:
            return sum(self.processor._get_num_multimodal_tokens(image_sizes=sizes)["num_image_tokens"])
        except ValueError as error:
            raise UnrenderablePrompt(f"the model's processor refuses them: {in_one_line(error)}") from error

    def placed(self, token_ids: list[int], digests: Sequence[str]) -> list[Picture]:
        """Return the pictures of a prompt, each with its place."""
        places = iter([place for place, token in enumerate(token_ids) if token == self.placeholder])
        pictures = [self.seen(digest).picture for digest in digests]
        starts = [next(itertools.islice(places, picture.length - 1, None), -1) for picture in pictures]
        return [
            msgspec.structs.replace(picture, start=last + 1 - picture.length)
            for picture, last in zip(pictures, starts, strict=True)
        ]

    def check(self, rendered: RenderedTokens) -> RenderedTokens:
        """Return a prompt; raise UnrenderablePrompt if its placeholders are not those of its pictures."""
        shown = set(itertools.chain(*(range(each.start, each.stop) for each in pictures_in(rendered))))
        placeholders = [place for place, token in enumerate(rendered.token_ids) if token in self.placeholders]
        if not shown.issuperset(placeholders) or len(placeholders) != len(shown):
            raise UnrenderablePrompt("a text spells the token that stands for a picture in the model's format")
        return rendered

    @property
    def merge_size(self) -> int:
        """The side of the square of patches that make a token."""
        return int(self.processor.image_processor.merge_size)

    def __call__(self, images: list[Any], return_tensors: str) -> dict[str, Any]:
        """Do the work of the model's image processor in a renderer of the package.

        Returns the `Picture` in place of its features, and a grid by which the package counts its placeholders.
        `images` has what `card_of` makes.
        """
        picture = self.seen(images[0].getchannel(0).tobytes().hex()).picture
        return {PICTURE: picture, "image_grid_thw": numpy.array([[1, picture.length, self.merge_size**2]])}


def processor_of(path: str, tokenizer: Any, trust_remote_code: bool) -> Any:
    """Return transformers' processor of a model, over Pillow and without its video part."""
    from transformers import AutoConfig
    from transformers.models.auto.image_processing_auto import AutoImageProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    base = PROCESSOR_MAPPING[type(config)]
    attributes = classmethod(lambda _: ["image_processor", "tokenizer"])
    cls: Any = type(base.__name__, (base,), {"get_attributes": attributes})
    images = AutoImageProcessor.from_pretrained(path, backend="pil", trust_remote_code=trust_remote_code)
    settings, _ = cls.get_processor_dict(path)
    return cls.from_args_and_dict([images, tokenizer], settings)


def probe_of(model: ModelConfig, tokenizer: Any) -> tuple[str, str, list[int]]:
    """Return what tells processors of pictures apart: text and features of a made-up picture, and sizes in tokens."""
    processor = PictureProcessor(model.path, tokenizer, PictureStore.passing(MAX_PIXELS), model.trust_remote_code)
    pixels = numpy.random.default_rng(0).integers(0, 256, (60, 100, 3), dtype=numpy.uint8)
    seen = processor.seen(processor.store.keep(Image.fromarray(pixels)))
    counts = processor.processor._get_num_multimodal_tokens(image_sizes=PROBED)["num_image_tokens"]
    return seen.text, seen.picture.features, counts


class PictureTokenizer(Remembering):
    """A tokenizer whose chat template puts the processor's text in the places of pictures; the rest is as it was."""

    def __init__(self, tokenizer: Any, processor: PictureProcessor | None):
        super().__init__(tokenizer)
        self.processor = processor
        self._wants_parts = False
        with contextlib.suppress(Exception):  # whatever a template raises of a text
            self._wants_parts = PROBE not in self._text([{"role": "user", "content": PROBE}])

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Return the tokens of a conversation, with special tokens in front where the template writes none.

        So does the model's processor. Raises UnrenderablePrompt where the template does not show each picture once.
        """
        text, digests = self._text(messages, **options), digests_in(messages)
        if digests:
            if self.processor is None:
                raise UnrenderablePrompt("a picture is shown by the run's own renderer alone")
            mark = self.processor.mark
            pieces = text.split(mark)
            if len(pieces) != len(digests) + 1 or any(mark in said for each in messages for said in texts_of(each)):
                problem = f"the chat template has {len(pieces) - 1} places ({mark}) for {len(digests)} pictures"
                raise UnrenderablePrompt(f"{problem}: choose a renderer that shows each, and spell none in a text")
            shown = [self.processor.seen(digest).text for digest in digests]
            text = "".join(itertools.chain(*zip(pieces, [*shown, ""], strict=True)))
        has_start = self._whole.bos_token is not None and text.startswith(self._whole.bos_token)
        return list(self._whole(text, add_special_tokens=not has_start).input_ids)

    def _text(self, messages: list[dict[str, Any]], **options: Any) -> str:
        shown = [message | {"content": self._content(message.get("content"))} for message in messages]
        return str(self._whole.apply_chat_template(shown, **{**options, "tokenize": False}))

    def _content(self, content: Any) -> Any:
        """Return a content as the template takes it."""
        if isinstance(content, list):
            return [{"type": "image"} if is_picture(part) else part for part in content]
        return [{"type": "text", "text": content}] if self._wants_parts and isinstance(content, str) else content


class PictureTemplateRenderer(TemplateRenderer):
    """Renders with the model's chat template, and puts the processor's placeholders in the places of pictures."""

    def __init__(self, tokenizer: Any, config: DefaultRendererConfig, processor: PictureProcessor | None = None):
        super().__init__(PictureTokenizer(tokenizer, processor), config)
        self.pictures = processor

    def render(self, messages: list[Any], **options: Any) -> RenderedTokens:
        rendered = super().render(messages, **options)
        if self.pictures is None:
            return rendered
        rendered.multi_modal_data = multi_modal(self.pictures.placed(rendered.token_ids, digests_in(messages)))
        return self.pictures.check(rendered)

    def bridge_to_next_turn(self, *given: Any, **options: Any) -> None:
        """Have the next prompt rendered whole: nobody knows how the template goes on."""


class SeeingRenderer:
    """A renderer of the package for a model of Qwen's that sees, with the pictures of a store; the rest is as it was.

    The package keeps what the processor made of a picture in memory. Here that lies in the store, and the package has a
    `Picture` in its place.
    """

    def __init__(self, renderer: Renderer, processor: PictureProcessor):
        self._renderer = renderer
        self.pictures = processor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    def render(self, messages: list[Any], **options: Any) -> RenderedTokens:
        return self.pictures.check(self._renderer.render(self._loaded(messages), **options))

    def bridge_to_next_turn(
        self, prompt_ids: list[int], completion_ids: list[int], messages: list[Any], **options: Any
    ) -> RenderedTokens | None:
        bridged = self._renderer.bridge_to_next_turn(prompt_ids, completion_ids, self._loaded(messages), **options)
        return None if bridged is None else self.pictures.check(bridged)

    def _loaded(self, messages: list[Any]) -> list[Any]:
        """Return messages with the pictures of the store in them."""
        contents = [message.get("content") for message in messages]
        return [
            message | {"content": [self._part(part) for part in content]} if isinstance(content, list) else message
            for message, content in zip(messages, contents, strict=True)
        ]

    def _part(self, part: dict[str, Any]) -> dict[str, Any]:
        digest = digest_in(part)
        return part if digest is None else {"type": "image", "image": card_of(digest)}


def card_of(digest: str) -> Image.Image:
    """Return a small image that stands for a picture, its digest as pixels: the package hashes each at every turn."""
    return Image.frombytes("L", (32, 1), bytes.fromhex(digest))


def seeing(renderer: Renderer, tokenizer: Any, processor: PictureProcessor) -> Renderer:
    """Return a renderer of the package that shows the pictures of a store; as it was, if it shows none."""
    if not is_multimodal(renderer) or not hasattr(processor.processor.image_processor, "merge_size"):
        return renderer
    made = type(renderer)(tokenizer, renderer.config, processor=SimpleNamespace(image_processor=processor))
    return SeeingRenderer(made, processor)
