"""What the orchestrator adds to the trainer's checkpoints."""

from pathlib import Path

from prl.orchestrator import pools
from prl.orchestrator.types import TrainEnv
from prl.wire import files


class Checkpoints:
    """Puts the difficulty pools, as they are then, beside the weights of each checkpoint."""

    def __init__(self, run_dir: Path, envs: list[TrainEnv]):
        self.run_dir = run_dir
        self.buffers = [env.buffer for env in envs if env.buffer.pooled]
        self._looked = -1
        """The last step whose checkpoint has its pools, or that has no checkpoint."""

    def complete(self, announced: int) -> None:
        """Write the pools where they are missing, up to the step that the trainer announced last.

        It makes the checkpoint of a step, if at all, before it announces the next one.
        """
        for step in range(self._looked + 1, announced + 1) if self.buffers else ():
            folder = files.checkpoint_path(self.run_dir, step)
            if folder.exists():
                tasks = {pool: [task for b in self.buffers for task in b.retired_to(pool)] for pool in pools.RETIRED}
                pools.write(folder, tasks)
            elif step == announced:
                return
            self._looked = step
