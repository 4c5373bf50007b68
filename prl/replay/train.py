"""Train on a run's batches again, and look after every step at what the run recorded, or at a second trainer."""

import sys
import time
from collections.abc import Callable, Iterator

from prl.errors import PrlError
from prl.replay.compare import OF_AN_UPDATE, differing_metrics, differing_token, gap, gap_to_file, shown
from prl.replay.recorded import Recorded
from prl.replay.side import Side, same_bits
from prl.wire.messages import StepBatch

PROGRESS_S = 10.0
Say = Callable[[str], None]


def train(recorded: Recorded, last: int, own: Side, beside: "Beside | None", say: Say) -> bool:
    """Train all steps up to `last` and say what was found. Returns whether nothing differs.

    Args:
        recorded: the run.
        last: the last step that has a batch.
        own: the trainer that the run had.
        beside: a changed trainer; None = there is none.
        say: prints a finding.
    """
    record, told, failed = Against(recorded, own, say), time.monotonic(), None
    step = 0
    for step in range(1, last + 1):
        batch = recorded.batch(step)
        if batch is None:
            raise PrlError(f"the batch of step {step} has been removed")
        try:
            own.train(batch)
        except PrlError as error:
            step, failed = step - 1, str(error)
            break
        record.check(batch)
        if beside is not None and not beside.train(batch):
            break
        if time.monotonic() - told > PROGRESS_S:
            told = time.monotonic()
            print(f"step {step} of {last}", file=sys.stderr, flush=True)
    if failed is not None:
        ended = step + 1 not in recorded.metrics
        say(f"{failed}; {'the run has no metrics of that step either' if ended else 'the run took it'}")
        record.differs = record.differs or not ended
    if beside is None or record.differs:
        record.conclude(step)
    return not record.differs if beside is None else beside.conclude(step) and not record.differs


class Against:
    """Compares a trainer with what the run recorded, step by step."""

    def __init__(self, recorded: Recorded, own: Side, say: Say):
        self.recorded, self.own, self.say = recorded, own, say
        self.differs = False
        self.steps: dict[str, set[int]] = {}
        """Of which steps something of a kind was compared."""
        self.weights = ""
        """Of the last weights that were compared: whether they are the same, the step and the folder."""

    def check(self, batch: StepBatch) -> None:
        """Compare the step that was just trained; say the first step that differs, and later weights that do."""
        for kind, found in list(self._findings(batch)):
            self.steps.setdefault(kind, set()).add(batch.step)
            if found is not None:
                if not self.differs:
                    self.say(f"step {batch.step}: the first difference from the run")
                self.differs = True
                self.say(found)

    def conclude(self, step: int) -> None:
        """Say how it ended, after the last step."""
        counts = ", ".join(f"{kind} of {len(steps)} steps" for kind, steps in self.steps.items())
        if self.weights:
            self.say(self.weights)
        elif not self.differs:
            self.say("the run has left no weights to compare (checkpoints/)")
        if not self.differs:
            self.say(f"{step} steps trained again; compared bit by bit: {counts or 'nothing'}")

    def _findings(self, batch: StepBatch) -> Iterator[tuple[str, str | None]]:
        """By kind, what of a step differs from the record, None where it is the same; once something did, weights."""
        names = ("in the run", "now")
        pairs = [] if self.differs else list(self.recorded.tokens(batch, self.own.tokens.lines))
        if pairs:
            yield "tokens", differing_token(pairs, self.own.text, names)
        if not self.differs and (line := self.recorded.metrics.get(batch.step)) is not None:
            yield "metrics", differing_metrics(line, self.own.metrics, names)
        for path in self.recorded.weights(batch.step):
            apart, where = gap_to_file(self.own, path), "/".join(path.parent.parts[-2:])
            same = "other weights than the run" if apart.tensors else "bitwise the same weights"
            self.weights = f"{same} at step {batch.step} ({where})"
            yield "weights", f"{where}: {apart}" if apart.tensors else None


class Beside:
    """A changed trainer, over the same batches as the run's own."""

    def __init__(self, own: Side, changed: Side, say: Say):
        self.own, self.changed, self.say = own, changed, say
        self.token_differs = self.update_differs = self.failed = False

    def train(self, batch: StepBatch) -> bool:
        """Take the step that the run's trainer has just taken; say the first difference. Returns whether it could."""
        try:
            self.changed.train(batch)
        except PrlError as error:
            self.say(f"{error}; the run's trainer took it")
            self.failed = True
            return False
        names = ("recorded", "changed")
        if not self.token_differs:
            pairs = zip(self.own.tokens.lines, self.changed.tokens.lines, strict=True)
            if found := differing_token(pairs, self.own.text, names):
                self.token_differs = True
                self.say(f"step {batch.step}: the first token that differs\n{found}")
        if not self.update_differs and (found := self._update(names)):
            self.update_differs = True
            self.say(f"step {batch.step}: the first update that differs\n{found}")
        if self.token_differs and self.update_differs:
            self.changed.trainer.export = None  # all has been seen of its tokens
        return True

    def conclude(self, step: int) -> bool:
        """Say how far apart the two have come. Returns whether nothing ever differed."""
        apart = gap(self.own.weights(), self.changed.weights())
        same = apart is not None and not (self.token_differs or self.update_differs or self.failed or apart.tensors)
        if same:
            self.say(f"nothing differs in {step} steps: tokens, metrics and weights are the same bit by bit")
        elif apart is None:
            self.say("the weights cannot be compared: the changed model has other tensors")
        else:
            self.say(f"weights after step {step}: {apart}")
        return same

    def _update(self, names: tuple[str, str]) -> str | None:
        """How the last update differs, None where it does not."""
        found = differing_metrics(self.own.metrics, self.changed.metrics, names)
        one, other = self.own.weights(), self.changed.weights()
        if all(name in other and same_bits(tensor, other[name]) for name, tensor in one.items()):
            return found and f"  {found}\n  weights: the same"
        same = ", ".join(f"{name} {shown(self.own.metrics[name])}" for name in OF_AN_UPDATE)
        return f"  {found or f'metrics: the same, {same}'}\n  weights: {gap(one, other) or 'of other tensors'}"
