"""The config groups: which there are, and the files of their options."""

from pathlib import Path

# In a wheel it lies beside this file, in a checkout one folder up.
CONF = next(folder / "conf" for folder in Path(__file__).parents if (folder / "conf").is_dir())


def options() -> dict[str, list[str]]:
    """The options of every config group: the files under `conf/`, but for those that only other options begin with."""
    result: dict[str, list[str]] = {}
    for path in sorted(CONF.glob("*/[!_]*.yaml")):
        result.setdefault(path.parent.name, []).append(path.stem)
    return result
