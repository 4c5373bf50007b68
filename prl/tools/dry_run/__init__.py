"""A dry run (`dry_run=true`): refuses what a run would, and predicts what it would take: processes, devices, bytes.

Start with `prediction.py`; `memory.py` is the arithmetic, `shape.py` counts a model's parameters. `rehearsal.py` plays
a first step with invented models, and `pictures.py` measures what prompts show.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prl.launch.builder import PreparedRun


def show(run: "PreparedRun") -> None:
    """Rehearse a prepared run, and print its first tasks and what it would take on the machine of its plan.

    Starts no process, loads no weights and writes nothing. Raises ConfigError for what a first step would end with,
    and for what the machine has no room for; the table is printed before that.
    """
    from prl.launch.prompts import as_read
    from prl.tools.dry_run.prediction import predict, report
    from prl.tools.dry_run.rehearsal import rehearse  # torch and transformers

    rehearse(run)
    for environment in run.environments.values():
        print(as_read(environment))
    if any(environment.pictures is not None for environment in run.environments.values()):
        from prl.tools.dry_run.pictures import sights

        for sight in sights(run):
            print(sight)
    report(run, predict(run))
