"""The `prl` command, whose subcommands are the modules that `python -m` starts.

prl train [group=option …] [key=value …]       python -m prl.train
prl serve model=tiny-teacher [key=value …]     python -m prl.serve
prl view <run> [--step N] …                    python -m prl.viewer
"""

import runpy
import sys
from collections.abc import Sequence

SUBCOMMANDS = {
    "train": ("prl.train", "train a policy, or sweep over configs with -m"),
    "serve": ("prl.serve", "serve a frozen model, for runs to distil from"),
    "view": ("prl.viewer", "page through the rollouts of a run"),
}
"""The module of each subcommand and its line in the usage text. Only the chosen module is imported."""


def usage() -> str:
    """The text that `prl --help` prints."""
    width = max(map(len, SUBCOMMANDS))
    lines = [f"  {name:<{width}}  {about}" for name, (_, about) in SUBCOMMANDS.items()]
    return "\n".join(["usage: prl SUBCOMMAND [argument …]", "", *lines, "", "`prl SUBCOMMAND --help` says more."])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a subcommand as `python -m` would run its module.

    Args:
        arguments: the subcommand and what follows it; None = the command line's.

    Raises:
        SystemExit: with status 2 where there is no subcommand of that name, and as the subcommand raises it.
    """
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or [""]
    if name in ("-h", "--help"):
        print(usage())
        return
    if name not in SUBCOMMANDS:
        problem = f"prl: no subcommand {name!r}" if name else "prl: no subcommand given"
        print(f"{problem}\n\n{usage()}", file=sys.stderr)
        raise SystemExit(2)
    sys.argv = [f"prl {name}", *rest]
    runpy.run_module(SUBCOMMANDS[name][0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
