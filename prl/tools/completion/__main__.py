"""Print what a shell needs to complete subcommands, config groups, keys, their values, and runs under outputs/.

    eval "$(prl completion bash)"             in ~/.bashrc; zsh likewise, in ~/.zshrc after compinit
    prl completion fish | source              in ~/.config/fish/config.fish

The scripts ask `prl completion words LINE` at each Tab. It reads the files of `conf/` line by line, and the sources of
the parsers: Hydra and the classes of the options take longer to import than somebody waits for a Tab.
"""

import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from prl.__main__ import SUBCOMMANDS
from prl.config.groups import CONF, options
from prl.tools import OUTPUTS

SHELLS = ["bash", "zsh", "fish"]
ROOTS = {"train": "train", "doctor": "train", "eval": "eval", "chat": "eval", "serve": "serve"}
"""The file of conf/ whose config a subcommand composes."""
TINKER = "api=tinker"
"""Argument of `prl serve` by which it composes another file, `tinker`."""
OF_MODELS = ("eval", "chat", "serve")
OF_RUNS = (*OF_MODELS, "report", "rollouts", "watch")
FLAGS = ["--help", "--help=all", "--cfg", "--resolve", "--multirun", "--config-dir", "--config-name"]
EXPERIMENTS = ("experiment", "arm", "debug", "sweep")
"""Groups whose options choose options of other groups."""

KEY = re.compile(r"( *)([\w.-]+):(?: +(.*))?")
DEFAULT = re.compile(r" *- (override )?/?([\w/]+)(?:@([\w.]+))?(?:: *(.*?))?(?: *#.*)?")
"""An entry of a defaults list: `- override /group@package: option`."""
KIND = re.compile(r".*\(([^()]*)\)")
"""The type of a key, at the end of its comment."""
WORD = re.compile(r"""(?:\\.|'[^']*'?|"[^"]*"?|[^\s\\'"])+""")
"""A word of a command line: blanks that are escaped or quoted belong to it, and the last quote may be open."""
FLAG = re.compile(r'\.add_argument\(\s*"(--[\w-]+)"')
PACKAGES = Path(__file__).parents[3]
"""The folder that `prl` is in."""
NO_CHOICE = {"any", "float", "function", "int", "str"}
Keys = Iterator[tuple[str, list[str]]]
"""Dotted keys, each with its values where those are few."""


def main(arguments: list[str]) -> None:
    """Print a shell's script, or the words that a line can be completed by."""
    if arguments[:1] == ["words"]:
        print("\n".join(sorted(words(" ".join(arguments[1:])))))
    elif len(arguments) == 1 and arguments[0] in SHELLS:
        print(Path(__file__).with_name(f"{arguments[0]}.sh").read_text(encoding="utf-8"), end="")
    elif {"-h", "--help"} & set(arguments):
        print(__doc__)
    else:
        print(__doc__, file=sys.stderr)  # a shell executes what is printed
        sys.exit(2)


def words(line: str) -> set[str]:
    """Return what the last word of a command line can become; `line` ends at the cursor."""
    begun = [*WORD.finditer(line)]
    parts = [re.sub(r"\\(.)|['\"]", r"\1", part[0]) for part in begun]
    word = parts.pop() if begun and begun[-1].end() == len(line) else ""
    command, *typed = parts[1:] or [""]
    if not command:
        found = [*SUBCOMMANDS, "--help", "--version"]
    elif word.startswith("-"):
        found = FLAGS if command in ROOTS else ["--help", *flags_of(command)]
    elif command == "completion":
        found = SHELLS
    elif command == "env":
        found = options()["env"] if typed else ["check"]
    else:
        found = runs() if command in OF_RUNS and "=" not in word else []
        found += [name for name in options()["model"] if name != "hf"] if command in OF_MODELS else []
        found += [TINKER] if command == "serve" else []
        root = "tinker" if TINKER in typed else ROOTS.get(command)
        found += overrides(root, typed, word) if root else []
    return {each for each in found if each.startswith(word) and each.isprintable()}


def flags_of(command: str) -> list[str]:
    """The flags of the parser in a subcommand's source."""
    module = PACKAGES.joinpath(*SUBCOMMANDS[command][0].split(".")) if command in SUBCOMMANDS else PACKAGES
    files = [file for file in (module / "__main__.py", module.with_suffix(".py")) if file.is_file()]
    return [flag for file in files for flag in FLAG.findall(file.read_text(encoding="utf-8"))]


def runs() -> list[str]:
    """The names of the runs, sweeps and Tinker servers under outputs/."""
    files = ("config.yaml", "sweep.json", "sessions.json")
    return [path.name for path in OUTPUTS.glob("*") if any((path / file).is_file() for file in files)]


def overrides(root: str, typed: list[str], word: str) -> list[str]:
    """Return the overrides that `word` can begin: a group with its options, or a key with its values.

    Args:
        root: The file of conf/ that is composed.
        typed: The words before it.
        word: The beginning of an override.
    """
    groups = options()
    sign = word[: len(word) - len(word.lstrip("+~"))]
    key, equals, value = word.removeprefix(sign).partition("=")
    group = key.partition("@")[0]
    if equals and group in groups:
        begun = value[: max(value.rfind("["), value.rfind(",")) + 1]  # of a list, or of the values of a sweep
        return [f"{sign}{key}={begun}{name}" for name in groups[group]]
    if equals and key in ("run.resume", "run.fork"):
        return [f"{sign}{key}={OUTPUTS / run}" for run in runs()]
    keys = keys_after(root, typed)
    if equals:
        return [f"{sign}{key}={each}" for each in keys.get(key, ())]
    nodes = {each.rpartition(".")[0] for each in keys}
    whole = [f"{each}." if each in nodes else f"{each}=" for each in keys]
    whole += [f"{each}=" for each in groups if sign or each in chosen_in(root)]
    rest = [each.removeprefix(key) for each in whole if each.startswith(key) and each != key]
    # One level at a time: `trainer.` leads to `trainer.optim.`.
    return [sign + key + "".join(each.partition(".")[:2]) for each in rest]


def keys_after(root: str, typed: list[str]) -> dict[str, list[str]]:
    """The keys of a command's config after the overrides `typed`, with their values where those are few."""
    given = {key: value for key, _, value in (each.lstrip("+").partition("=") for each in typed)}
    chosen: dict[str, str] = {}
    for group in EXPERIMENTS:
        chosen |= chosen_in(f"{group}/{given.get(group)}")
    chosen |= given
    keys = dict(keys_of(root, "", chosen))
    for key, option in given.items():
        group, _, package = key.partition("@")
        if package:
            keys |= keys_of(f"{group}/{option}", package, {})
    return keys


def chosen_in(file: str) -> dict[str, str]:
    """The options that a file's defaults list chooses, by their groups."""
    entries = filter(None, map(DEFAULT.fullmatch, lines_of(file)))
    return {entry[2]: entry[4] for entry in entries if entry[4]}


def keys_of(file: str, package: str, chosen: dict[str, str]) -> Keys:
    """Yield the keys that a file of conf/ has with its node at `package`; `chosen` are options of groups."""
    group = file.rpartition("/")[0]
    above: list[tuple[int, str]] = []
    comment = ""
    for line in lines_of(file):
        if line.lstrip().startswith("#"):
            comment += line.strip("# ") + " "
        elif entry := DEFAULT.fullmatch(line):
            _, name, where, option = entry.groups()
            if option is None:
                yield from keys_of(f"{group}/{name}".strip("/"), package, chosen)
            elif not entry[1]:
                option = option if where or package else chosen.get(name, option)
                for each in re.findall(r"[\w.-]+", option):
                    at = where or package_of(f"{name}/{each}")
                    yield from keys_of(f"{name}/{each}", f"{package}.{at}".strip("."), chosen)
        elif match := KEY.fullmatch(line):
            above = [*(node for node in above if node[0] < len(match[1])), (len(match[1]), match[2])]
            if match[2] == "defaults" and match[3]:  # [_fields, _self_]
                yield from keys_of(f"{group}/_fields", package, chosen)
            elif above[0][1] not in ("defaults", "hydra") and not match[2].startswith("_"):
                key = ".".join(name for _, name in above)
                yield f"{package}.{key}".strip("."), values_of(comment.strip(), match[3] or "")
            comment = ""


def lines_of(file: str) -> list[str]:
    """The lines of a file of conf/; none where there is no such file."""
    path = CONF / f"{file}.yaml"
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def package_of(file: str) -> str:
    """The key of an option's node: what its first line says, else its group."""
    own = re.match(r"# @package (\S+)", "".join(lines_of(file)[:1]))
    return file.partition("/")[0] if own is None else own[1].removeprefix("_global_")


def values_of(comment: str, value: str) -> list[str]:
    """The values that a key can have, by the type in its comment; none where there are too many."""
    kind = KIND.fullmatch(comment)
    text, null, _ = (kind[1] if kind else "").partition(" or null")
    names = text.split(", ")
    if text == "bool" or value in ("true", "false"):
        names = ["true", "false"]
    few = all(re.fullmatch(r"[a-z]\w*", name) for name in names) and not NO_CHOICE & set(names)
    return [*(names if few else []), *(["null"] if null else [])]


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it, as it ends any program that prints
    main(sys.argv[1:])
