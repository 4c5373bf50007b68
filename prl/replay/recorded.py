"""What a run recorded of its training: batches, metrics, tokens, weights. Nothing in it is written."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from prl.config.instantiate import factory, plain
from prl.config.schema import TrainConfig
from prl.errors import UNREADABLE, PrlError
from prl.orchestrator.packing import check_aligned
from prl.provenance import model_hash, packages
from prl.wire.checkpoints import checkpoint_path
from prl.wire.files import FileTransport, step_name
from prl.wire.messages import StepBatch
from prl.wire.transport import Transport

READ = re.compile(r"(model|trainer|loss|seed|max_steps)(\.|$)|envs\.[^.]+\.loss(\.|$)")
"""Config keys that the trainer is told."""

MAX_THREADS = 1024
"""More than any machine has cores: a file that says so was not written by a run."""


class Kept(NamedTuple):
    """The batches of a run, looked at once before anything is trained."""

    last: int
    """The last step that has one."""
    initial_reference: bool
    """Whether a sample asks for the logprobs of the model that the run began with."""


class Recorded:
    """The directory of a run that kept its batches."""

    def __init__(self, run_dir: Path, config: TrainConfig):
        self.run_dir = run_dir
        self.config = config
        self.ranks: int = config.trainer.num_processes
        self.transport: Transport = factory(config.transport, Transport, "transport")(run_dir=run_dir)
        self.metrics = self._metrics()
        """The lines of `metrics.jsonl`, by step."""

    def check_batches(self) -> Kept:
        """Read every batch. Raises PrlError where there are none, one is missing, or one is damaged."""
        if not plain(self.config.orchestrator).get("keep_batches"):
            raise PrlError(
                f"{self.run_dir} has kept no batches: train with orchestrator.keep_batches=true to replay a run"
            )
        last = max([self.config.max_steps, *self.metrics])
        found: list[int] = []
        asked = False
        for step in range(1, last + 1):
            if (batch := self.batch(step)) is None:
                continue
            if missing := sorted(set(range(1, step)) - set(found)):
                raise PrlError(f"{self._where(missing[0], 0)} is missing, and later steps are there")
            found.append(step)
            asked = asked or any(any(row.initial_reference) for row in batch.micro_batches)
        if not found:
            raise PrlError(f"{self._where(1, 0)} is missing, and so are all other batches of the run")
        return Kept(found[-1], asked)

    def batch(self, step: int) -> StepBatch | None:
        """What all ranks trained on in a step, None where nothing was kept. Raises PrlError for a damaged batch."""
        parts = [self.transport.receive_batch(step, rank) for rank in range(self.ranks)]
        found = [part for part in parts if part is not None]
        if not found:
            return None
        for rank, part in enumerate(parts):
            if part is None:
                raise PrlError(f"{self._where(step, rank)} is missing, and those of other ranks are there")
            if problem := damage(part, step):
                raise PrlError(f"{self._where(step, rank)} does not hold a batch: {problem}")
        return StepBatch(step, [row for part in found for row in part.micro_batches], found[0].truncated)

    def tokens(self, batch: StepBatch, lines: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """What the run exported of a step's sequences, each with the line among `lines` that is of the same one.

        Of every sequence, or of those that `first_groups` picks; `lines` are of all.
        """
        from prl.trainer.export import first_groups  # torch

        start, sequences = 0, iter(lines)
        for rank in range(self.ranks):
            rows = batch.micro_batches[start : (start := start + len(batch.micro_batches) // self.ranks)]
            places = [(number, place) for number, row in enumerate(rows) for place in range(len(row.losses))]
            own = dict(zip(places, sequences, strict=False))
            path = self.run_dir / "tokens" / step_name(batch.step) / f"rank_{rank}.jsonl"
            if not path.exists():  # the run exported nothing
                continue
            exported = list(read_lines(path))
            if not all(map(is_whole, exported)):
                raise PrlError(f"{path} has a sequence whose fields do not fit its tokens")
            if len(exported) != len(own):
                own = {place: own[place] for place in sorted(first_groups(rows))}
            if len(exported) != len(own):
                raise PrlError(f"{path} has {len(exported)} sequences, but the batch has {len(own)}")
            yield from zip(exported, own.values(), strict=False)

    def weights(self, step: int) -> Iterator[Path]:
        """The files of weights that are left of a step."""
        for folder in (self.transport.weights_path(step), checkpoint_path(self.run_dir, step)):
            if (path := folder / "model.safetensors").is_file():
                yield path

    def caveats(self) -> Iterator[str]:
        """Why the weights of this run may come out otherwise. Raises PrlError where its model is another by now."""
        provenance = self._provenance()
        then, now = provenance.get("models", {}).get("model"), model_hash(self.config.model.path)
        if then and then.get("method") == now["method"] and then.get("sha256") != now.get("sha256"):
            raise PrlError(f"model.path={self.config.model.path!r} has other weights than when the run began")
        if self.ranks > 1:
            yield f"the run had {self.ranks} trainer ranks, whose sums one process adds up in another order"
        device = self.config.trainer.device
        if device == "cuda" or (device == "auto" and provenance.get("gpus")):
            yield "the run trained on a GPU, and bitwise the same is promised for one CPU process"
        try:
            for line in read_lines(self.run_dir / "resumes.jsonl", cut=True):
                changed = line.get("changed")
                if isinstance(changed, dict) and (read := [key for key in changed if READ.match(key)]):
                    yield f"the run went on after step {line.get('step')} with other values of {', '.join(read)}"
        except PrlError as error:
            yield str(error)
        here = packages()
        for name, version in provenance.get("packages", {}).items():
            if name in ("torch", "transformers") and here.get(name) != version:
                yield f"the run had {name} {version}, this is {here.get(name)}"

    def _metrics(self) -> dict[int, dict[str, Any]]:
        """The last line of a file that is being written may be incomplete."""
        found: dict[int, dict[str, Any]] = {}
        path = self.run_dir / "metrics.jsonl"
        for line in read_lines(path, cut=True):
            if not isinstance(line.get("step"), int | float):
                raise PrlError(f"{path} has a line without a step")
            found[int(line["step"])] = line
        return found

    def threads(self) -> int:
        """Threads that each rank computed with, which the order of sums follows; 1 where the run does not say."""
        found = self._provenance().get("threads")
        threads = found.get("trainer") if isinstance(found, dict) else None
        return threads if isinstance(threads, int) and 1 <= threads <= MAX_THREADS else 1

    def _provenance(self) -> dict[str, Any]:
        path = self.run_dir / "provenance.json"
        try:
            return dict(json.loads(path.read_bytes())) if path.is_file() else {}
        except (*UNREADABLE, TypeError) as error:
            raise PrlError(f"{path} cannot be read: {error}") from error

    def _where(self, step: int, rank: int) -> str:
        transport = self.transport
        if isinstance(transport, FileTransport):
            return str(transport.batch_path(step, rank))
        return f"the batch of step {step} for rank {rank}"


def damage(batch: StepBatch, step: int) -> str | None:
    """What is wrong with a batch that could be decoded; None where it is whole."""
    if batch.step != step:
        return f"it is that of step {batch.step}"
    for number, row in enumerate(batch.micro_batches):
        sequences = len(row.sequence_lengths)
        try:
            check_aligned(row)
        except ValueError as error:
            return f"row {number}: {error}"
        if min(row.sequence_lengths, default=1) < 1 or sum(row.sequence_lengths) > len(row.input_ids):
            return f"row {number}: its sequences do not fit its {len(row.input_ids)} tokens"
        named = (row.env_names, row.losses, row.initial_reference or row.losses, row.origins or row.losses)
        if any(len(names) != sequences for names in named):
            return f"row {number}: it has not one env, loss and origin for each of its {sequences} sequences"
    return None


def is_whole(line: dict[str, Any]) -> bool:
    """Whether an exported sequence has tokens, and as many of each other field that is one of tokens."""
    tokens = line.get("token_ids")
    of_calls = ("versions", "task")  # a task's id may be any JSON
    lists = [value for name, value in line.items() if isinstance(value, list) and name not in of_calls]
    return isinstance(tokens, list) and all(len(each) == len(tokens) for each in lists)


def read_lines(path: Path, *, cut: bool = False) -> Iterator[dict[str, Any]]:
    """The lines of a JSON lines file; none where it is not there. With `cut` the last one may be incomplete."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            yield msgspec.json.decode(line, type=dict[str, Any])
        except UNREADABLE as error:
            if not (cut and number == len(lines)):
                raise PrlError(f"{path}, line {number} cannot be read: {error}") from error
