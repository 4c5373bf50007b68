"""The renderer of a run: messages to tokens and back."""

import functools
from typing import Any

from prl.errors import ConfigError


def renderer_config(name: str, args: dict[str, Any], key: str = "renderer.name"):
    """The package's own config of the renderer `name`; `key` is what chose it, for messages."""
    from pydantic import TypeAdapter, ValidationError
    from renderers import RendererConfig

    try:
        return TypeAdapter(RendererConfig).validate_python({"name": name, **args})
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"][1:]) or ("import_path" if name == "custom" else "")
        raise ConfigError(f"{f'renderer.args.{where}' if where else key}: {problem['msg']}") from error
    except (ImportError, OSError, TypeError) as error:  # of renderer=custom, whose class is looked up at once
        raise ConfigError(f"renderer.args.import_path: {error}") from error


def make_renderer(tokenizer: Any, name: str, args: dict[str, Any], key: str = "renderer.name"):
    """The renderer `name` of the `renderers` package over `tokenizer`, with its own settings `args`; `key` is what chose it."""
    from renderers import create_renderer

    config = renderer_config(name, args, key)
    remember_short_texts(tokenizer)
    try:
        return create_renderer(tokenizer, config)
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"{key}={name} does not fit this model's tokenizer: {error}") from error
    except RuntimeError as error:  # gpt-oss brings a vocabulary of its own, which it downloads
        raise ConfigError(f"{key}={name} cannot be made: {error}") from error


def remember_short_texts(tokenizer: Any) -> None:
    """Cache what short texts encode to: renderers encode the same role names and markers for every message."""
    encode = tokenizer.encode

    @functools.lru_cache(maxsize=1024)
    def short(text: str) -> tuple[int, ...]:
        return tuple(encode(text, add_special_tokens=False))

    def cached(text: Any, *args: Any, add_special_tokens: bool = True, **kwargs: Any) -> list[int]:
        if add_special_tokens or args or kwargs or not isinstance(text, str) or len(text) > 32:
            return encode(text, *args, add_special_tokens=add_special_tokens, **kwargs)
        return list(short(text))

    tokenizer.encode = cached
