"""The `prl` command, whose subcommands are the modules that `python -m` starts.

prl train [group=option …] [key=value …]       python -m prl.train
prl serve model=tiny-teacher [key=value …]     python -m prl.serve
prl view <run> [--step N] …                    python -m prl.viewer
prl report <run or sweep> …                    python -m prl.report
"""

import runpy
import sys

SUBCOMMANDS = {"train": "prl.train", "serve": "prl.serve", "view": "prl.viewer", "report": "prl.report"}
"""The module of each subcommand. Only the chosen one is imported."""

USAGE = """usage: prl SUBCOMMAND [argument …]

  train   train a policy, or sweep over configs with -m
  serve   serve a frozen model, for runs to distil from
  view    page through the rollouts of a run
  report  write the page of a run, or the summary of several

`prl SUBCOMMAND --help` says more."""


def main() -> None:
    """Run a subcommand as `python -m` would run its module.

    Raises:
        SystemExit: with status 2 where there is no subcommand of that name, and as the subcommand raises it.
    """
    name, *rest = sys.argv[1:] or [""]
    if name in ("-h", "--help"):
        print(USAGE)
        return
    if name not in SUBCOMMANDS:
        problem = f"prl: no subcommand {name!r}" if name else "prl: no subcommand given"
        print(f"{problem}\n\n{USAGE}", file=sys.stderr)
        raise SystemExit(2)
    sys.argv = [f"prl {name}", *rest]
    runpy.run_module(SUBCOMMANDS[name], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
