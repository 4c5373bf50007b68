"""The `prl` command, whose subcommands are the modules that `python -m` starts.

prl train [group=option …] [key=value …]       python -m prl.train
prl serve <target> [key=value …]               python -m prl.serve
prl rollouts <run> [--step N] …                python -m prl.tools.rollouts
prl eval <target> … [key=value …]              python -m prl.eval
prl chat <target> [key=value …]                python -m prl.tools.chat
prl report <run or sweep> …                    python -m prl.tools.report
prl watch [run or folder …]                    python -m prl.tools.watch
prl env check math …                           python -m prl.tools.env_check check
prl doctor [key=value …]                       python -m prl.tools.doctor
prl completion bash|zsh|fish                   python -m prl.tools.completion
"""

import os
import runpy
import sys

SUBCOMMANDS = {
    "train": ("prl.train", "train a policy, or sweep over configs with -m"),
    "serve": ("prl.serve", "serve what a run has trained, or any model"),
    "rollouts": ("prl.tools.rollouts", "page through the rollouts of a run"),
    "eval": ("prl.eval", "evaluate checkpoints, runs, models or endpoints"),
    "report": ("prl.tools.report", "write the page and the trace of a run, or the summary of several"),
    "watch": ("prl.tools.watch", "show runs in a browser while they train"),
    "chat": ("prl.tools.chat", "talk to one of them"),
    "env": ("prl.tools.env_check", "check a taskset: prl env check <taskset>"),
    "doctor": ("prl.tools.doctor", "say what is installed, what a run would choose here, and what is missing"),
    "completion": ("prl.tools.completion", "print the script with which bash, zsh or fish completes all this"),
}
"""The module of each subcommand, and what it does. Only the chosen one is imported."""

USAGE = """usage: prl SUBCOMMAND [argument …]

{}

`prl SUBCOMMAND --help` says more; `prl --version` says which prl this is.""".format(
    "\n".join(f"  {name:10}  {does}" for name, (_, does) in SUBCOMMANDS.items())
)


def main() -> None:
    """Run a subcommand as `python -m` would run its module, with the working directory in front of `sys.path`.

    Raises:
        SystemExit: with status 2 where there is no subcommand of that name, and as the subcommand raises it.
    """
    name, *rest = sys.argv[1:] or [""]
    if name in ("-h", "--help"):
        print(USAGE)
        return
    if name == "--version":
        import prl

        print(prl.__version__)
        return
    if name not in SUBCOMMANDS:
        import difflib

        near = difflib.get_close_matches(name, SUBCOMMANDS, n=1)
        problem = f"prl: no subcommand {name!r}" if name else "prl: no subcommand given"
        problem += f": did you mean {near[0]}?" if near else ""
        print(f"{problem}\n\n{USAGE}", file=sys.stderr)
        raise SystemExit(2)
    sys.argv = [f"prl {name}", *rest]
    # The user's own modules lie in the working directory.
    try:
        here = os.getcwd()
    except FileNotFoundError:
        print("error: the current folder has been removed: cd to one that is there", file=sys.stderr)
        raise SystemExit(2) from None
    if not sys.flags.safe_path and sys.path[:1] != [here]:
        sys.path.insert(0, here)
    try:
        runpy.run_module(SUBCOMMANDS[name][0], run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:  # while it imports; from then on `prl.launch.command` ends it
        print("stopped", file=sys.stderr, flush=True)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
