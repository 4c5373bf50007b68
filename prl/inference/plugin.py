"""vLLM general plugin (entry point `vllm.general_plugins`), loaded in every process of the engine.

vLLM's shared-memory queue yields the processor in a busy loop for a second after each message. With a core to
spare that saves microseconds; on a small machine it takes the core that the trainer needs. Here a reader sleeps
in short steps instead. Only engines started by prl on a CPU are changed (`PRL_ENGINE_POLL_S`).
"""

import os
import time


def register() -> None:
    poll_s = os.environ.get("PRL_ENGINE_POLL_S")
    if not poll_s:
        return
    from vllm.distributed.device_communicators import shm_broadcast

    pause = float(poll_s)
    idle_wait = shm_broadcast.SpinCondition.wait

    def wait(self, timeout_ms: int | None = None) -> None:
        if time.monotonic() <= self.last_read + self.busy_loop_s:
            time.sleep(pause)
        else:
            idle_wait(self, timeout_ms)

    shm_broadcast.SpinCondition.wait = wait
