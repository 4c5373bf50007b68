"""A trainer that trains from recorded batches, in this process, and what can be seen of its tokens and weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from prl.errors import PrlError
from prl.trainer.batch import Stack
from prl.trainer.export import TokenExport
from prl.trainer.loss import TokenFates
from prl.trainer.model import token_text
from prl.trainer.weights import whole_tensors
from prl.trainer.worker import make_trainer
from prl.wire.messages import StepBatch, sequence_slices


class Tokens(TokenExport):
    """Keeps a step's lines instead of writing them, with what the loss asks of each token.

    Beside the fields of the export, a line has `gradient` and `entropy_gradient` `[tokens]`: the derivatives of the
    step's loss by the policy's logprob of the token and by the entropy there.
    """

    def __init__(self) -> None:
        super().__init__(Path(), 0)
        self.lines: list[dict[str, Any]] = []
        """Of every sequence, in shipping order."""
        self._watched: dict[str, torch.Tensor] = {}
        self._gradients: dict[tuple[int, int], dict[str, list]] = {}

    def watch(self, logprobs: torch.Tensor, entropy: torch.Tensor) -> None:
        self._watched = {"gradient": logprobs, "entropy_gradient": entropy}
        for values in self._watched.values():
            values.retain_grad()

    def add(self, stack: Stack, logprobs: torch.Tensor, fates: TokenFates) -> None:
        super().add(stack, logprobs, fates)
        columns = {
            name: (torch.zeros_like(values) if values.grad is None else values.grad).tolist()
            for name, values in self._watched.items()
        }
        self._watched = {}
        for origin, part in zip(stack.origins, sequence_slices(stack.sequence_lengths), strict=True):
            self._gradients[origin] = {name: column[part] for name, column in columns.items()}

    def write(self, batch: StepBatch) -> None:
        places = [(number, place) for number, row in enumerate(batch.micro_batches) for place in range(len(row.losses))]
        lines = zip(self._lines(batch), places, strict=True)
        self.lines = [line | self._gradients.get(place, {}) for line, place in lines]
        self._found, self._filled, self._gradients = {}, {}, {}


class Side:
    """A trainer of its own, as a run's process makes it; several take turns in one process.

    Args:
        name: in messages.
        payload: what the trainer's process would read as its config.
    """

    def __init__(self, name: str, payload: Mapping[str, Any]):
        self.name = name
        self.model_config = payload["model"]
        self.tokens = Tokens()
        self.trainer = make_trainer(payload, torch.device(payload["trainer"]["device"]), export=self.tokens)
        self.metrics: dict[str, float] = {}
        """Of the step trained last."""
        self._random = torch.get_rng_state()

    def train(self, batch: StepBatch) -> None:
        """Take one step. Raises PrlError, with the weights as they were, for a step that cannot be trained."""
        torch.set_rng_state(self._random)
        try:
            self.metrics = self.trainer.train_step(batch)
        except (PrlError, ValueError, IndexError, RuntimeError) as error:
            kind = "" if isinstance(error, PrlError) else f"{type(error).__name__}: "
            reason = kind + str(error).partition("\n")[0]
            raise PrlError(f"step {batch.step}: {self.name} cannot take it: {reason}") from error
        self._random = torch.get_rng_state()

    def weights(self) -> dict[str, torch.Tensor]:
        """The tensors that a checkpoint would have, by name; not copies, but for those that have an adapter."""
        return dict(whole_tensors(self.trainer.model, torch.float32))

    def text(self, token: int) -> str:
        """The text of a token."""
        return token_text(self.model_config)(token)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, type and bits: 0.0 is not -0.0, and a NaN is itself."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(each.cpu().contiguous().flatten().view(torch.uint8) for each in (one, other)))
