"""Measures of a server: metrics of each model, in files as a run leaves them, and a line on the terminal.

So `prl report` and `prl watch` read the folder of a model: its `config.yaml`, `metrics.jsonl` and `result.json`.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from prl.base.errors import PrlError
from prl.base.files import write_atomically
from prl.base.masking import masked
from prl.base.terminal import Console
from prl.base.text import as_message
from prl.losses.interface import Metrics, add_metric
from prl.monitors.console import clock
from prl.monitors.jsonl import JsonLines
from prl.runs.owner import owned
from prl.runs.result import RunResult, write_result
from prl.tinker import losses
from prl.tinker.store import ModelStore
from prl.tinker.wire import Adam, Forward

log = logging.getLogger(__name__)
EVERY_S = 10.0
"""[s] From one line on the terminal to the next."""
CONFIG = "config.yaml"
Result = dict[str, Any]


class Busy:
    """Seconds in which at least one piece of work was going on."""

    def __init__(self) -> None:
        self._past, self._began, self._running = 0.0, 0.0, 0

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        if not self._running:
            self._began = time.monotonic()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._past += time.monotonic() - self._began

    @property
    def seconds(self) -> float:
        return self._past + (time.monotonic() - self._began if self._running else 0.0)


class Meters:
    """The measures of trainer and engine, and of each model that is in use. `path` is that of the base."""

    def __init__(self, path: str):
        self.path = path
        self.busy = {"trainer": Busy(), "engine": Busy()}
        self.tokens: Counter[str] = Counter()
        self.courses: dict[Path, Course] = {}

    def of(self, store: ModelStore) -> "Course":
        """Return the measures of a model, which begin here."""
        if store.folder not in self.courses:
            self.courses[store.folder] = Course(store, self)
        return self.courses[store.folder]

    def sampled(self, snapshot: Path | None, sequences: list[dict[str, Any]]) -> None:
        """Count replies of a snapshot, or of the base."""
        tokens = sum(len(sequence["tokens"]) for sequence in sequences)
        self.tokens["sampled"] += tokens
        cut = sum(sequence["stop_reason"] == "length" for sequence in sequences)
        for path in () if snapshot is None else self.courses.keys() & set(snapshot.parents):
            self.courses[path].sums["tokens/generated"] += tokens
            add_metric(self.courses[path].means, "length/all/mean", tokens, len(sequences))
            add_metric(self.courses[path].means, "truncated/all", cut, len(sequences))

    def end(self, folder: Path, status: str, error: str | None = None) -> None:
        """Write how the work on a model ended, until there is more."""
        if folder in self.courses:
            self.courses.pop(folder).end(status, error)

    async def show(self, state: Callable[[], str]) -> None:
        """Print a line every so often, but none where nothing has happened."""
        console, began = Console(stderr=True), time.monotonic()
        while True:
            tokens, then = Counter(self.tokens), [busy.seconds for busy in self.busy.values()]
            await asyncio.sleep(EVERY_S)
            shares = [(busy.seconds - past) / EVERY_S for busy, past in zip(self.busy.values(), then, strict=True)]
            if any(shares):
                trained, sampled = ((self.tokens[kind] - tokens[kind]) / EVERY_S for kind in ("trained", "sampled"))
                rates = f"tokens/s: {trained:,.0f} trained, {sampled:,.0f} sampled"
                busy = f"busy: trainer {shares[0]:.0%}, engine {shares[1]:.0%}"
                line = "  ".join([clock(time.monotonic() - began), state(), rates, busy])
                console.print(as_message(line), soft_wrap=True, highlight=False, markup=False)


class Course:
    """The metrics of a model since its last step, and the files with those of its steps."""

    def __init__(self, store: ModelStore, meters: Meters):
        self.store, self.meters = store, meters
        self.work = Busy()
        self.steps, self.loss_fn = 0, ""
        self.files = contextlib.ExitStack()
        self.files.enter_context(owned(store.folder))  # tells readers that there is more to come
        (store.folder / "result.json").unlink(missing_ok=True)
        self.lines = JsonLines()
        self.lines.start(store.folder, max_steps=0, run_config={})
        self.files.callback(self.lines.close)
        self.began = time.monotonic()
        self._anew()

    def _anew(self) -> None:
        self.sums: Counter[str] = Counter()
        self.means: Metrics = {}
        self.since = time.monotonic()
        self.busy = self.meters.busy | {"work": self.work}
        self.busy_then = {name: busy.seconds for name, busy in self.busy.items()}

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Count the time of the block, in which the trainer works for the model."""
        with self.meters.busy["trainer"].working(), self.work.working():
            yield

    def passed(self, asked: Forward, result: Result) -> None:
        """Count a pass that made a gradient. Its trained tokens are those with a weight or an advantage."""
        self.loss_fn = asked.loss_fn
        component, key = ("ce", "weights") if asked.loss_fn == "cross_entropy" else ("rl", "advantages")
        known = asked.loss_fn != "custom"  # a loss of the client's, whose inputs may mean anything
        counted = losses.flat(asked.data, key) != 0 if known else losses.flat(asked.data, "target_tokens") >= 0
        tokens = int(counted.sum())
        self.meters.tokens["trained"] += tokens
        self.sums.update({"tokens/trained": tokens, "tokens/forward": sum(len(datum.tokens) for datum in asked.data)})
        add_metric(self.means, f"loss/{component}", result["metrics"]["loss:sum"], tokens)
        if component == "rl" and known:
            own = np.concatenate([np.frombuffer(logprobs, np.float32) for logprobs in result["logprobs"]])
            gap = (own.astype(np.float64) - losses.flat(asked.data, "logprobs"))[counted]
            add_metric(self.means, "logprob_gap/mean", float(np.abs(gap).sum()), tokens)
            add_metric(self.means, "mismatch_kl/all/mean", float((np.expm1(gap) - gap).sum()), tokens)
        for name, value in result["metrics"].items():
            if name.endswith(":mean"):
                add_metric(self.means, name, value, 1)
            else:
                self.sums[name] = max(self.sums[name], value) if name.endswith(":max") else self.sums[name] + value

    def stepped(self, adam: Adam, result: Result) -> None:
        """Write the metrics of a step: by prl's names where the meaning is the same, else by those of the protocol."""
        elapsed, metrics = time.monotonic() - self.since, result["metrics"]
        busy = {name: busy.seconds - self.busy_then[name] for name, busy in self.busy.items()}
        line = {"step": metrics["step:max"], "lr": adam.learning_rate, "grad_norm": metrics["unclipped_grad_l2:mean"]}
        line |= self.sums
        line |= {name: total / count for name, (total, count) in self.means.items() if count}
        line |= {
            f"tokens/{kind}_per_second": self.sums[f"tokens/{kind}"] / elapsed for kind in ("trained", "generated")
        }
        line |= {f"idle/{name}": max(0.0, 1 - busy[name] / elapsed) for name in self.meters.busy}
        line |= {"time/step": elapsed, "time/train": busy["work"]}
        try:
            self.lines.step(line)
            if not (self.store.folder / CONFIG).exists():
                self._write_config()
        except PrlError as error:  # the step has been made all the same
            log.warning("%s", error)
        self.steps = int(line["step"])
        self._anew()

    def _write_config(self) -> None:
        """Write what the model is, by the keys of a run."""
        record = self.store.record
        rank, seed = (None, None) if record.lora is None else (record.lora.rank, record.lora.seed)
        # OmegaConf, which reads it, would read on behind this sign.
        about = {key: str(value).replace("${", "$ {") for key, value in (record.user_metadata or {}).items()}
        model = {"path": self.meters.path, "lora": {"rank": rank}}
        data = {"seed": seed, "model": model, "loss": self.loss_fn, "user_metadata": masked(about)}
        write_atomically(self.store.folder / CONFIG, msgspec.json.format(msgspec.json.encode(data)))

    def end(self, status: str, error: str | None) -> None:
        """Write how it ended, and close the files."""
        seconds = round(time.monotonic() - self.began, 3)
        write_result(self.store.folder, RunResult(status=status, error=error, steps=self.steps, seconds=seconds))
        self.files.close()
