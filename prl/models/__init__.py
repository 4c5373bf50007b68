"""Local models: small policies that come with prl."""

from pathlib import Path


def model_path(name: str) -> str:
    """The folder of the local model `name`."""
    return str(Path(__file__).parent / name)
