"""Early stopping and the best checkpoint: what follows from evaluations and from the clock."""

import json
import shutil
import statistics
import time
from collections.abc import Mapping
from pathlib import Path

from prl.base.checkpoint_folders import seal
from prl.base.files import naming, writing
from prl.base.metric_names import held_out
from prl.config.model_folder import write_files
from prl.config.orchestrator import StopConfig
from prl.orchestrator.state import StoppingState
from prl.rollouts.rewards import at_least, at_most


def held_out_reward(metrics: Mapping[str, float]) -> float | None:
    """Return the mean of `eval/<env>/avg@<k>` over envs, each env counting once; None without an evaluation."""
    rewards = held_out(metrics)
    return statistics.fmean(rewards.values()) if rewards else None


class EarlyStopping:
    """Says when the run may end before `max_steps`, and which version was the best so far."""

    def __init__(self, config: StopConfig):
        self.config = config
        self.best: float | None = None
        """The highest held-out reward so far."""
        self.reason: str | None = None
        """The reason to end the run; None while there is none. It stays once it is set."""
        self.worse = 0
        """Evaluations since that of the highest reward."""
        self._started = time.monotonic()

    def state_dict(self) -> StoppingState:
        """Return what another part of the run goes on with."""
        return StoppingState(self.best, self.worse, self.seconds)

    def load_state_dict(self, state: StoppingState) -> None:
        """Go on from an earlier part of the run."""
        self.best = state.best
        self.worse = state.worse
        self._started = time.monotonic() - state.seconds

    @property
    def seconds(self) -> float:
        """Time spent on training so far, in all parts of a run that went on."""
        return time.monotonic() - self._started

    def evaluated(self, version: int, reward: float) -> bool:
        """Take in the held-out reward of `version`. Returns whether it is the best so far; of equals the first is."""
        # Up to rounding: a mean over tasks in another order is no progress.
        is_best = self.best is None or not at_most(reward, self.best)
        self.best = reward if is_best else self.best
        self.worse = 0 if is_best else self.worse + 1
        stop = self.config
        if stop.target is not None and at_least(reward, stop.target):
            self._end(
                f"version {version} has a held-out reward of {reward:.3f}, orchestrator.stop.target={stop.target:g}"
            )
        if stop.patience is not None and self.worse >= stop.patience:
            evaluations = "1 evaluation" if self.worse == 1 else f"{self.worse} evaluations in a row"
            self._end(f"{evaluations} had no better held-out reward than {self.best:.3f} (orchestrator.stop.patience)")
        return is_best

    def trained(self, step: int) -> None:
        """Look at the clock after a step."""
        budget, spent = self.config.time_budget_s, self.seconds
        if budget is not None and spent >= budget:
            self._end(f"{spent:.0f} s had passed at step {step}, orchestrator.stop.time_budget_s={budget:g}")

    def _end(self, reason: str) -> None:
        self.reason = self.reason or reason


def keep_best(run_dir: Path, weights: Path, tokenizer: Mapping[str, bytes], version: int, reward: float) -> None:
    """Make `checkpoints/best` the policy that was evaluated, in place of the one before.

    A Hugging Face folder: the weights in the number format in which the engine loaded them, the tokenizer, `best.json`,
    which says which version it is and its held-out reward, and a manifest. Of version 0, which is the model itself,
    `best.json` alone.
    """
    final = run_dir / "checkpoints" / "best"
    with naming(final), writing(final) as folder:
        if version:
            without_metrics = shutil.ignore_patterns("metrics.json")  # what the trainer says of it
            shutil.copytree(weights, folder, ignore=without_metrics, dirs_exist_ok=True)
            write_files(tokenizer, folder)
        (folder / "best.json").write_text(json.dumps({"step": version, "reward": reward}) + "\n", encoding="utf-8")
        if version:
            seal(folder, version)
