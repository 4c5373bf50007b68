"""Parts that the commands have in common: suggestions for keys that do not exist, and errors as exit codes."""

import contextlib
import inspect
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import MissingConfigException
from omegaconf import DictConfig

from prl.base.errors import ConfigError, PrlError, of_disk
from prl.base.text import as_message, safe
from prl.config import suggestions
from prl.config.compose import CONF, allow_new_filters, options
from prl.launch.signals import noted, stop, stopping

REFUSED, FAILED, INTERRUPTED = 2, 1, 130
PRINTING = ("-h", "--help", "--hydra-help", "-c", "--cfg", "-i", "--info")
"""Flags that have a command print, and nothing else."""

FULL_ERROR = "HYDRA_FULL_ERROR"
"""With this variable of the environment Hydra raises what is wrong with a config, which it would print in its way."""
MORE = "\nall options: --help=all"
"""The end of each command's help."""
ALL = """\
Every key with its value: --cfg job --resolve. Each option is a file that says what its keys do: conf/README.md.
Further flags of Hydra: --hydra-help."""
"""The end of the help with all options."""
LINE = 400
"""Longest line of somebody else's that is shown as it is, characters."""

LEFT_OUT = ("full_key:", "object_type=", "reference_type=", "To append to your config use +")
"""Beginnings of lines that help nobody: most keys that Hydra would append are refused then."""

_traces = FULL_ERROR in os.environ
"""The user wants to see tracebacks."""
_started = False
"""The config has composed: what fails from then on is not about its keys."""


@contextlib.contextmanager
def errors_as_exit_codes() -> Iterator[None]:
    """Print a PrlError as one line and exit: 2 for a refused config, 1 for a failed run, 128 + its number for a signal.

    A job begins with this; what reads arguments for it has it too.
    """
    global _started
    _started = True
    if not _traces:
        os.environ.pop(FULL_ERROR, None)
    try:
        yield
    except (PrlError, OSError) as error:
        if (message := of_disk(error)) is None:
            if not isinstance(error, PrlError):
                raise
            message = refused(error) if isinstance(error, ConfigError) else str(error)  # or what a server or a log said
        print(f"error: {as_message(message)}", file=sys.stderr, flush=True)
        raise SystemExit(REFUSED if isinstance(error, ConfigError) else FAILED) from None
    except KeyboardInterrupt as end:
        raise stopped(end) from None


def stopped(end: KeyboardInterrupt) -> SystemExit:
    """Say that a command was stopped; return what ends it, with the status that says by which signal."""
    print("stopped", file=sys.stderr, flush=True)
    return SystemExit(128 + getattr(end, "number", signal.SIGINT))


def one_line(error: BaseException) -> str:
    """Return what Hydra, OmegaConf or the file system says of a config that does not compose, as one line."""
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, option = (error.missing_cfg_file or "").rpartition("/")
        return f"there is no {group or 'config'}={option}: choose {', '.join(error.options)}"
    cause = None if isinstance(error, ConfigError) else error.__cause__  # prl's own words say it all
    texts = [str(each).strip() for each in (error, cause) if each is not None]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    kept = [line for line in lines if line and not line.startswith(LEFT_OUT)]
    kept = [line if len(line) <= LINE else f"{line[: LINE // 2]} … {line[-LINE // 2 :]}" for line in kept]
    return ": ".join(dict.fromkeys(line.rstrip(".:") for line in kept)) or type(error).__name__


def about(overrides: list[str], message: str) -> str:
    """Return what was said of a config that does not compose, with the overrides if it names the key of none."""
    parts = [part for override in overrides for part in suggestions.override_key(override).split(".")]
    named = any(part in message for part in parts if len(part) > 2)  # a letter is in every text
    return message if named or not overrides else f"{', '.join(overrides)[:LINE]}: {message}"


def refused(error: ConfigError) -> str:
    """A refusal as it is printed: on one line, whatever the values in it are."""
    text = safe(str(error)).replace("\n", "\\n")
    return text if len(text) <= 4 * LINE else f"{text[: 3 * LINE]} … {text[-LINE:]}"


def run(job: Callable[[], None], arguments: list[str], root: str = "train") -> None:
    """Run a Hydra job over `conf/<root>.yaml`; where it does not compose, say what the keys should have been."""
    global _started
    _started = False
    noted.clear()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for what this process computes itself, and an env's graders
    if any(argument.split("=")[0] in PRINTING for argument in arguments):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it, as it ends any program that prints
    asked = {"-h", "--help", "--help=all"} & set(arguments)
    if asked:
        usage = inspect.cleandoc(sys.modules[job.__module__].__doc__ or "")
        print(f"{usage}\n{all_options() if '--help=all' in asked else MORE}")
        return
    given, groups = [arg for arg in arguments if "=" in arg and not arg.startswith("-")], options()
    sys.argv[1:] = allow_new_filters(arguments)  # Hydra reads its arguments there
    for number in stopping():
        if signal.getsignal(number) == signal.SIG_DFL:  # under nohup it is ignored
            signal.signal(number, stop)
    os.environ.setdefault(FULL_ERROR, "1")  # until the job starts
    try:
        job()
    except KeyboardInterrupt as end:
        raise stopped(end) from None
    except Exception as error:
        if _started or _traces:
            raise
        print(f"error: {as_message(about(given, one_line(error)))}", file=sys.stderr)
        config = composed(given, groups, root)
        removed = [arg for arg in arguments if arg.startswith("~")]
        for hint in filter(None, (suggestions.hint(argument, config, groups) for argument in given + removed)):
            print(as_message(hint), file=sys.stderr)
        raise SystemExit(REFUSED) from None


def all_options() -> str:
    """Return the options of all config groups. Hydra's own help takes seconds."""
    groups = [
        textwrap.fill(
            f"{group}: {', '.join(names)}",
            79,
            initial_indent="    ",
            subsequent_indent="        ",
            break_on_hyphens=False,
        )
        for group, names in options().items()
    ]
    return "\n".join(["", "Groups and their options (group=option):", "", *groups, "", ALL])


def composed(arguments: list[str], groups: Iterable[str], root: str = "train") -> DictConfig:
    """The config of the options chosen for groups among `arguments`, where those compose; else that of the defaults."""
    named = {*groups, "hydra.searchpath"}
    chosen = [each for each in arguments if re.split("[@/]", suggestions.override_key(each))[0] in named]
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        with contextlib.suppress(Exception):  # Hydra has said what is wrong with them
            return hydra.compose(root, chosen)
        return hydra.compose(root)
