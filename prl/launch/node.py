"""A process of a run on another node than its launcher: the task of an `srun` that the launcher has started.

    python -m prl.launch.node COMMAND [ARG …]        with the launcher's pipe as standard input, by way of srun

It gives the command what a process beside the launcher has: a reaper, which hears the launcher through the pipe
(`prl.reaper`), and a folder of this node for temporary files (`prl.scratch`). `PRL_GPUS` names the GPUs that it gets of
those which the task sees.
"""

import os
import signal
import subprocess
import sys

from prl import reaper
from prl.config.gpus import visible_devices
from prl.errors import ConfigError
from prl.scratch import Scratch

GPUS = "PRL_GPUS"


def main(command: list[str]) -> int:
    """Run a command to its end, or until the launcher wants it to end. Returns its status."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # Slurm sends them to all; the launcher decides
        signal.signal(number, lambda *_: None)
    env = dict(os.environ)
    if gpus := env.pop(GPUS, ""):
        env |= visible_devices([int(gpu) for gpu in gpus.split(",")], env)
    scratch = Scratch()
    try:
        status = subprocess.Popen(
            [sys.executable, "-S", "-P", reaper.__file__, *command],
            env=env | scratch.environment,
            start_new_session=True,
            pass_fds=[scratch.lock],
        ).wait()
    finally:
        scratch.remove()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as error:
        sys.exit(f"error: {error}")
