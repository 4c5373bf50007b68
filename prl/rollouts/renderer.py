"""The renderer of a run: messages to tokens and back."""

from typing import Any

from prl.config.errors import ConfigError


def make_renderer(tokenizer: Any, name: str, args: dict[str, Any]):
    """The renderer `name` of the `renderers` package over `tokenizer`, with its own settings `args`."""
    from pydantic import TypeAdapter, ValidationError
    from renderers import RendererConfig, create_renderer

    try:
        config = TypeAdapter(RendererConfig).validate_python({"name": name, **args})
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"][1:])
        key = f"renderer.args.{where}" if where else "renderer.name"
        raise ConfigError(f"{key}: {problem['msg']}") from error
    try:
        return create_renderer(tokenizer, config)
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"renderer.name={name} does not fit this model's tokenizer: {error}") from error
