"""What the commands have in common: suggestions for keys that do not exist, and errors as exit codes."""

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prl.compose import CONF, allow_new_filters, options
from prl.config import suggestions
from prl.errors import ConfigError, PrlError

if TYPE_CHECKING:
    from omegaconf import DictConfig

REFUSED, FAILED, INTERRUPTED = 2, 1, 130


@contextlib.contextmanager
def errors_as_exit_codes(*, sweep: bool = False) -> Iterator[None]:
    """Print a PrlError as one line and exit: 2 for a refused config, 1 for a failed run, 130 for Ctrl-C.

    In a `sweep` the error is raised again, for Hydra to mark the job as failed and go on with the next.
    """
    try:
        yield
    except PrlError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        if sweep:
            raise
        raise SystemExit(REFUSED if isinstance(error, ConfigError) else FAILED) from None
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr, flush=True)
        raise SystemExit(INTERRUPTED) from None


_started = False


def job_started() -> None:
    """The config composed: whatever fails from here on is not about its keys."""
    global _started
    _started = True


def run(job: Callable[[], None], arguments: list[str], root: str = "train") -> None:
    """Run a Hydra job over `conf/<root>.yaml`; where it does not compose, say what the keys should have been."""
    given, groups = [arg for arg in arguments if "=" in arg and not arg.startswith("-")], options()
    problems = [
        f"there is no {key!r} here: {hint}"
        for key in map(suggestions.override_key, given)
        if (hint := suggestions.retired(key))
    ]
    problems += [problem for problem in [suggestions.misused_groups(given, groups)] if problem is not None]
    if problems:
        print(f"error: {problems[0]}", file=sys.stderr)
        raise SystemExit(2)
    sys.argv[1:] = allow_new_filters(arguments)  # Hydra reads its arguments there
    try:
        job()
    except SystemExit as end:
        if end.code and not _started:
            config = composed(given, set(groups), root)
            searched = any("hydra.searchpath" in argument for argument in given)  # it may have options unknown here
            for argument in given:
                hints = [] if searched else suggestions.misspelt_option(argument, groups)
                for hint in hints or suggestions.misspelt(argument, config, set(groups)):
                    print(hint, file=sys.stderr)
        raise


def composed(arguments: list[str], groups: set[str], root: str = "train") -> "DictConfig":
    """The config of the options chosen for groups among `arguments`, of those that compose, and of the defaults."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    search = [argument for argument in arguments if suggestions.override_key(argument) == "hydra.searchpath"]
    choices = [
        argument
        for argument in arguments
        if re.split("[@/]", suggestions.override_key(argument))[0] in {*groups, "schema"}
    ]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(root)
        composing: list[str] = []
        for argument in search + choices:
            with contextlib.suppress(Exception):  # Hydra has said what is wrong with it
                config = compose(root, [*composing, argument])
                composing.append(argument)
    return config
