"""Small models that come with prl, one folder each."""

from pathlib import Path


def model_path(name: str) -> str:
    """Return the folder of the model `name`."""
    return str(Path(__file__).parent / name)
