"""What the commands have in common: suggestions for keys that do not exist, and errors as exit codes."""

import contextlib
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from prl import help, rerun
from prl.compose import CONF, allow_new_filters, options
from prl.config import suggestions
from prl.errors import ConfigError, PrlError
from prl.terminal import guard
from prl.text import safe

REFUSED, FAILED, INTERRUPTED = 2, 1, 130
HELP = ("-h", "--help")
PRINTING = (*HELP, "--hydra-help", "-c", "--cfg", "-i", "--info")
"""Flags that have a command print, and nothing else."""

_started = False
"""Whether the config has composed: what fails from then on is not about its keys."""


@contextlib.contextmanager
def errors_as_exit_codes() -> Iterator[None]:
    """Print a PrlError as one line and exit: 2 for a refused config, 1 for a failed run, 130 for Ctrl-C.

    The job has started with this.
    """
    global _started
    _started = True
    guard()  # a job of a sweep may be in a process of its own
    try:
        yield
    except PrlError as error:
        print(f"error: {safe(str(error))}", file=sys.stderr, flush=True)  # it may tell what a server or a log said
        raise SystemExit(REFUSED if isinstance(error, ConfigError) else FAILED) from None
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr, flush=True)
        raise SystemExit(INTERRUPTED) from None


def expanded(arguments: list[str]) -> list[str]:
    """The arguments with `--from <run>` replaced by the overrides that it stands for; exits where that is refused."""
    guard()
    try:
        return arguments if set(HELP) & set(arguments) else rerun.expand(arguments)
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(REFUSED) from None


def helped(name: str, arguments: list[str]) -> bool:
    """Print what `--help` asks for, if it is among the arguments of the command `name`; return whether it was."""
    if any(argument.split("=")[0] in PRINTING for argument in arguments):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it, as it ends any program that prints
    if not set(HELP) & set(arguments):
        return False
    try:
        print(help.page(name, arguments))
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(REFUSED) from None
    return True


def run(job: Callable[[], None], arguments: list[str], root: str = "train") -> None:
    """Run a Hydra job over `conf/<root>.yaml`; where it does not compose, say what the keys should have been."""
    guard()
    if helped(root, arguments):
        return
    given, groups = [arg for arg in arguments if "=" in arg and not arg.startswith("-")], options()
    retired = [
        f"there is no {key!r} here: {hint}"
        for key in map(suggestions.override_key, given)
        if (hint := suggestions.retired(key))
    ]
    problem = next(iter(retired), None) or suggestions.misused_groups(given, groups)
    if problem is not None:
        print(f"error: {problem}", file=sys.stderr)
        raise SystemExit(REFUSED)
    sys.argv[1:] = allow_new_filters(arguments)  # Hydra reads its arguments there
    try:
        job()
    except SystemExit as end:
        if end.code and not _started:
            config = composed(given, groups, root)
            searched = any("hydra.searchpath" in argument for argument in given)  # it may have options unknown here
            for argument in given:
                hints = [] if searched else suggestions.misspelt_option(argument, groups)
                for hint in hints or suggestions.misspelt(argument, config, groups):
                    print(hint, file=sys.stderr)
        raise


def composed(arguments: list[str], groups: Iterable[str], root: str = "train") -> DictConfig:
    """The config of the options chosen for groups among `arguments`, of those that compose, and of the defaults."""
    chosen = [argument for argument in arguments if suggestions.override_key(argument) == "hydra.searchpath"]
    chosen += [
        argument
        for argument in arguments
        if re.split("[@/]", suggestions.override_key(argument))[0] in {*groups, "schema"}
    ]
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        config = hydra.compose(root)
        composing: list[str] = []
        for argument in chosen:
            with contextlib.suppress(Exception):  # Hydra has said what is wrong with it
                config = hydra.compose(root, [*composing, argument])
                composing.append(argument)
    return config
