"""Says from within a run in which phase it is, and stays there for a moment: parts that a test names in its config.

The test writes the phase that it waits for into `$PRL_PHASES/wanted`; the first process to be in it makes
`$PRL_PHASES/reached`. The filter and the taskset are in `phased_env.py`, which a trainer need not import.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from prl.trainer.schedule import Linear

HOLD_S = 0.3
"""How long a phase that is waited for is kept open, seconds."""


def announce(phase: str) -> None:
    """Say that this process is in `phase`, if a test waits for that, and give it time to do its worst."""
    folder = Path(os.environ["PRL_PHASES"])
    try:
        wanted = (folder / "wanted").read_text()
    except FileNotFoundError:
        return
    if wanted == phase:
        (folder / "reached").touch()
        time.sleep(HOLD_S)


@dataclass(kw_only=True)
class Steady(Linear):
    """Says when it is asked for in the middle of a step; its state, in the middle of writing a checkpoint."""

    def factor(self, step: int, max_steps: int) -> float:
        announce("training")
        return super().factor(step, max_steps)

    def state_dict(self) -> dict[str, int]:
        announce("checkpointing")
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {}
