"""Small models: those that come with prl, one folder each, and those that are made from a package on first use.

Start with `make`; `smollm2.py` makes one.
"""

import os
import sys
from pathlib import Path

from prl.base.errors import ConfigError
from prl.models import smollm2

HERE = Path(__file__).parent
MADE = {"smollm2": smollm2}
"""Modules that make a model, by its name: `write(folder, package_file())`, from `VERSION` of the package `PACKAGE`."""


def cache_folder() -> Path:
    """Return where prl keeps what outlives a run and can be made again. Raises ConfigError where there is no home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "prl"
    except RuntimeError:
        raise ConfigError(
            "this user has no home directory: set HOME or XDG_CACHE_HOME to a folder of its own"
        ) from None


def names() -> list[str]:
    """The models that prl has."""
    return sorted([*MADE, *(path.parent.name for path in HERE.glob("*/config.json"))])


def model_path(name: str) -> str:
    """Return the folder of the model `name`. One of `MADE` is there once `make` was asked for it."""
    return str(cache_folder() / "models" / f"{name}-{MADE[name].VERSION}" if name in MADE else HERE / name)


def make(folder: Path) -> bool:
    """Return whether `folder` is that of a model in `MADE`; it is made if it is not there.

    Of several commands that need it one makes it, the others wait. Raises ConfigError where it cannot be made.
    """
    name = next((name for name in MADE if str(folder) == model_path(name)), None)
    if name is None:
        return False
    if folder.is_dir():
        return True
    source = MADE[name].package_file()
    from filelock import FileLock

    from prl.base.checkpoint_folders import seal  # msgspec, which composing a config does not need
    from prl.base.files import writing

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if folder.is_dir():
                return True
            print(f"making model {name} from {MADE[name].PACKAGE} {MADE[name].VERSION}", file=sys.stderr, flush=True)
            with writing(folder) as new:
                MADE[name].write(new, source)
                seal(new, 0)
    except OSError as error:
        raise ConfigError(f"no model {name} in {folder} (XDG_CACHE_HOME): {error.strerror or error}") from error
    return True
