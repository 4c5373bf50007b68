"""Completion in the shell, for `prl …` and for `python -m prl.…`.

    source <(prl completion bash)        in ~/.bashrc, or once per shell

The script asks this module at each press of the tab key what may follow: `prl completion query <line so far>`.
Subcommands, groups and their options, keys and their choices come from the config as the line so far composes it, a
search path included; runs come from `outputs/`.
"""

import argparse
import contextlib
import shlex
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from prl.__main__ import SUBCOMMANDS
from prl.models import names

BASH = """# Completion of prl and of python -m prl.…
_prl_complete() {
    local line="${COMP_LINE:0:COMP_POINT}" cur IFS=$'\\n'
    local asked=("$1" completion)
    if [[ "${1##*/}" == python* ]]; then
        [[ "$line" == *" -m prl"* ]] || return 0
        asked=("$1" -m prl.completion)
    fi
    cur="${line##*[[:space:]]}"
    COMPREPLY=($("${asked[@]}" query "$line" 2>/dev/null))
    # Bash replaces only what follows the last of its word breaks, such as = and :
    local before="${cur%"${cur##*["$COMP_WORDBREAKS"]}"}"
    COMPREPLY=("${COMPREPLY[@]#"$before"}")
}
complete -o nospace -o default -o bashdefault -F _prl_complete prl python python3
"""
SHELLS = {"bash": BASH}
FLAGS = ["--help ", "--cfg job ", "--resolve "]
FLAGS_OF_TRAIN = ["--from ", "--trust ", "--multirun "]


def candidates(line: str) -> list[str]:
    """What may stand in the place of the last word of `line`; a candidate that ends a word has a space behind it."""
    module, words = command_of(line)
    if module is None:
        found = [f"{name} " for name in SUBCOMMANDS]
    elif module in ("prl.train", "prl.serve", "prl.eval", "prl.chat"):
        found = of_config(module.rpartition(".")[2], words)
    elif module == "prl.replay":
        *before, word = words
        named = any("=" not in each and not each.startswith("-") for each in before)
        first = ["--trust "] if word.startswith("-") else [f"{run} " for run in runs()]
        found = of_config("train", words) if named and not word.startswith("-") else first
    elif module == "prl.completion":
        found = [f"{shell} " for shell in SHELLS]
    elif module == "prl.env":
        found = of_env(words)
    else:
        found = [f"{run} " for run in runs()]
    return sorted({each for each in found if each.startswith(words[-1])})


def command_of(line: str) -> tuple[str | None, list[str]]:
    """The module that a line starts, None where it names none yet, and its arguments; the last may be unfinished."""
    try:
        words = shlex.split(line)
    except ValueError:  # inside quotes
        words = line.split()
    if not words or line[-1].isspace():
        words.append("")
    modules = {module: module for module, _ in SUBCOMMANDS.values()}
    if "-m" in words[:-1] and Path(words[0]).name.startswith("python"):
        name, *rest = words[words.index("-m") + 1 :]
        if rest and name in modules:
            return name, rest
        if not rest or name != "prl":
            return None, ["\0"]  # nothing to offer
        words = [name, *rest]
    if len(words) < 3:
        return None, words[1:] or [""]
    return SUBCOMMANDS.get(words[1], ("", ""))[0], words[2:]


def runs() -> list[str]:
    """The runs under `outputs/`."""
    return [path.parent.name for path in Path("outputs").glob("*/config.yaml")]


def of_env(words: list[str]) -> list[str]:
    """What may follow `prl env`: its subcommand, then an env."""
    from prl.compose import options

    return [["check "], [f"{env} " for env in options()["env"]], []][min(len(words), 3) - 1]


def of_config(name: str, words: list[str]) -> list[str]:
    """Groups, options, keys and choices that may follow for a command, its targets, and runs after `--from`."""
    *before, word = words
    if before and before[-1] == "--from":
        return [f"{run} " for run in runs()]
    if word.startswith("-"):
        return [*FLAGS, *(FLAGS_OF_TRAIN if name == "train" else [])]
    import hydra
    from omegaconf import DictConfig, OmegaConf

    from prl.compose import CONF, allow_new_filters, options
    from prl.help import groups_of, keys_of, root_of

    root = root_of(name)
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = None
        for kept in ([each for each in before if "=" in each or each.startswith("~")], []):
            with contextlib.suppress(Exception):  # the line so far is wrong: complete as if it were not there
                cfg = cfg or hydra.compose(root, allow_new_filters(kept))
    sign = word[: len(word) - len(word.lstrip("+~"))]
    key, equals, value = word[len(sign) :].partition("=")
    groups = list(options()) if sign or cfg is None else groups_of(name, cfg)
    if equals and (group := key.split("@")[0]) in groups:
        listed = value[: max(value.rfind(mark) for mark in "[,") + 1]  # env=[math,… and a sweep's algo=grpo,…
        end, named = "" if listed.startswith("[") else " ", listed.strip("[").split(",")
        return [f"{sign}{key}={listed}{option}{end}" for option in options()[group] if option not in named]
    parent, _, last = key.rpartition(".")
    node: Any = OmegaConf.select(cfg, parent) if parent and cfg is not None else cfg
    if not isinstance(node, DictConfig):
        return []
    if equals:
        return [f"{sign}{key}={value} " for value in choices(node, last)]
    prefix = f"{parent}." if parent else ""
    children = list(map(str, node)) if parent else keys_of(name, node)
    nodes = {child for child in children if isinstance(node._get_node(child), DictConfig) and node._get_node(child)}
    keys = [f"{sign}{prefix}{child}{'.' if child in nodes else '='}" for child in children]
    if parent:
        return keys
    targets = [f"{target} " for target in (*names(), *runs())] if root == "eval" and not sign else []
    return [*keys, *(f"{sign}{group}=" for group in groups), *targets]


def choices(node: Any, name: str) -> list[str]:
    """The values of a key: those of its type, where it has a few, else the one it has."""
    from omegaconf import OmegaConf

    from prl.config.signature import hints_of
    from prl.help import component

    schema = OmegaConf.get_type(node)
    hint = (hints_of(schema) | hints_of(component(schema))).get(name)
    literals = [value for each in flat(hint) if get_origin(each) is Literal for value in get_args(each)]
    if hint is bool or bool in flat(hint):
        literals += ["true", "false"]
    if literals:
        return [str(value) for value in literals]
    with contextlib.suppress(Exception):  # no value yet, or one that follows what is not there
        value = node[name]
        return ["null" if value is None else str(value)] if not isinstance(value, list | dict) else []
    return []


def flat(hint: Any) -> list[Any]:
    """An annotation and all that it is made of."""
    parts = () if get_origin(hint) is Literal else get_args(hint)
    return [hint, *(each for part in parts for each in flat(part))]


def main() -> None:
    """`prl completion <shell>` prints the script; `query <line>` what may follow, a line each."""
    if sys.argv[1:2] == ["query"]:
        print("\n".join(candidates(" ".join(sys.argv[2:]))))
        return
    parser = argparse.ArgumentParser(prog="prl completion", description="Print the completion script of a shell.")
    parser.add_argument("shell", choices=sorted(SHELLS))
    print(SHELLS[parser.parse_args().shell], end="")


if __name__ == "__main__":
    main()
