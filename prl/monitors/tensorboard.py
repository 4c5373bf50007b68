"""Metrics, config and some rollouts in TensorBoard."""

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import yaml

from prl.base.metric_names import SAMPLED
from prl.base.text import safe
from prl.config.run_yaml import flat
from prl.monitors.base import Monitor
from prl.monitors.examples import examples, facts_of, messages_of

Scalar = bool | int | float | str


@dataclass(kw_only=True, eq=False)
class TensorBoard(Monitor):
    """Event files under `tensorboard/` in the run directory: `tensorboard --logdir <run>/tensorboard`."""

    needs_package: ClassVar[str] = "tensorboard"

    def start(self, run_dir: Path, *, max_steps: int, run_config: dict[str, Any], resumed_at: int = 0) -> None:
        self.check("TensorBoard")
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        purge = resumed_at + 1 if resumed_at else None  # what an earlier part of the run wrote after it
        self._writer = SummaryWriter(log_dir=str(run_dir / "tensorboard"), purge_step=purge)
        self._run_dir, self._max_steps = run_dir, max_steps
        self._writer.add_text("config", as_code(yaml.safe_dump(run_config, sort_keys=False)), resumed_at)
        values = {key: value if isinstance(value, Scalar) else str(value) for key, value in flat(run_config).items()}
        for part in hparams(values, {SAMPLED: 0.0}):
            cast(Any, self._writer).file_writer.add_summary(part)

    def step(self, line: dict[str, float]) -> None:
        step = int(line["step"])
        for key, value in line.items():
            if key != "step":
                self._writer.add_scalar(key, value, step)
        for number, record in enumerate(examples(self._run_dir, step, self._max_steps)):
            parts = [facts_of(record), *messages_of(record)]
            text = "\n\n".join("\n".join(f"{key}: {value}" for key, value in part.items()) for part in parts)
            self._writer.add_text(f"rollouts/{number}", as_code(text), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def as_code(text: str) -> str:
    """Return a text as a block of code: TensorBoard reads Markdown, in which a model might write an image."""
    return textwrap.indent(safe(text), "    ", lambda line: True)
