"""The orchestrator's part of a checkpoint: the difficulty pools."""

from pathlib import Path

from prl.orchestrator.buffer.task_buffer import RETIRED, write_pools
from prl.orchestrator.types import TrainEnv
from prl.wire import files


class Checkpoints:
    """Writes the difficulty pools, as they are then, beside the weights of each checkpoint.

    Invariant: after `complete(step)` every checkpoint that the trainer had written when it announced `step` has its
    pools, written once.
    """

    def __init__(self, run_dir: Path, envs: list[TrainEnv]):
        self.run_dir = run_dir
        self.buffers = [env.buffer for env in envs if env.buffer.pooled]
        self._completed = -1
        """Up to this step, every checkpoint has its pools."""

    def complete(self, announced: int) -> None:
        """Write the pools that are missing, up to the step that the trainer announced last.

        The trainer writes the checkpoint of a step, if at all, before it announces the next step. A checkpoint of the
        last announced step may therefore still come.
        """
        for step in range(self._completed + 1, announced + 1) if self.buffers else ():
            folder = files.checkpoint_path(self.run_dir, step)
            if folder.exists():
                retired = {pool: [task for b in self.buffers for task in b.retired_to(pool)] for pool in RETIRED}
                write_pools(folder, retired)
            elif step == announced:
                return
            self._completed = step
