"""The launcher that starts no process: the trainer is a thread of this one."""

import json
import logging
import threading
from dataclasses import dataclass, field

from prl.base.errors import ConfigError
from prl.launch.launcher import Launcher, ProcessDied
from prl.launch.plan import RunPlan, TrainerSpec

log = logging.getLogger(__name__)

STOP_S = 10.0
"""Deadline for a trainer that is to stop, seconds: it ends its step first."""


@dataclass(kw_only=True)
class InlineLauncher(Launcher):
    """Trains in a thread of this process. With `engine=transformers`, a run needs nothing else."""

    trainer: threading.Thread | None = field(default=None, init=False, repr=False)
    stopping: threading.Event = field(default_factory=threading.Event, init=False, repr=False)
    error: BaseException | None = field(default=None, init=False, repr=False)
    """Error that the trainer failed with."""

    def check_plan(self, plan: RunPlan) -> None:
        if plan.trainer.num_processes > 1:
            raise ConfigError(f"trainer.num_processes={plan.trainer.num_processes}: launcher=inline has one thread")
        if plan.policy.is_started:
            raise ConfigError("launcher=inline starts no server: choose engine=transformers, or launcher=local")
        if plan.teacher is not None and plan.teacher.is_started:
            raise ConfigError("launcher=inline starts no server: choose teacher=inline, or launcher=local")

    def start_trainer(self, spec: TrainerSpec) -> None:
        self.trainer = threading.Thread(target=self._train, args=(spec,), name="prl-trainer", daemon=True)
        self.trainer.start()

    def _train(self, spec: TrainerSpec) -> None:
        import torch

        from prl.trainer import worker

        torch.set_num_threads(spec.threads)  # of this thread
        config = json.loads(json.dumps(spec.payload))  # as the process of a trainer gets it
        try:
            worker.run(config, spec.run_dir, self.stopping)
        except SystemExit:
            log.info("the trainer was stopped while it waited")
        except Exception as error:
            log.info("the trainer failed", exc_info=True)
            self.error = error

    def ensure_alive(self) -> None:
        if self.error is not None:
            from prl.trainer.worker import reason

            text = reason(self.error) or f"{type(self.error).__name__}: {self.error}"
            raise ProcessDied(f"the trainer failed: {text}", "trainer") from self.error

    async def finish(self, timeout_s: float) -> None:
        trainer = self.trainer
        if trainer is not None:
            await self.wait_until(lambda: not trainer.is_alive(), timeout_s)
        self.ensure_alive()

    def stop(self) -> None:
        self.stopping.set()
        if self.trainer is not None:
            self.trainer.join(STOP_S)
