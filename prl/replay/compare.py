"""Where two trainings differ first, and by how much."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from prl.errors import PrlError
from prl.replay.side import Side, same_bits
from prl.wire.messages import STREAM_FILL

OF_A_TOKEN = {
    "token_ids": "token id",
    "mask": "mask",
    "temperature": "temperature",
    "inference_logprobs": "the sampler's logprob",
    **{name: name for name in STREAM_FILL},
    "ref_logprobs": "the reference's logprob",
    "trainer_logprobs": "logprob",
    "ratio": "ratio",
    "fate": "fate",
    "gradient": "d loss / d logprob",
    "entropy_gradient": "d loss / d entropy",
}
"""What is compared of each token, with its name for people: what it was trained on, then what follows from that."""
OF_AN_UPDATE = ("loss/mean", "grad_norm", "lr")
"""What is named first of the metrics of a step."""
LISTED = 4
"""Metrics that are named."""

Pairs = Iterable[tuple[dict[str, Any], dict[str, Any]]]
"""Lines of the same sequences, as the token export has them."""


def differing_token(pairs: Pairs, decode: Any, names: tuple[str, str]) -> str | None:
    """The first token that two trainings treat differently, with the values of both; None where there is none.

    Args:
        pairs: lines of the same sequences in their order.
        decode: the text of a token id.
        names: what the two are called.
    """
    first, count, total = "", 0, 0
    for one, other in pairs:
        fields = [name for name in OF_A_TOKEN if one.get(name) is not None and other.get(name) is not None]
        for place, token in enumerate(one["token_ids"]):
            found = [name for name in fields if not same(one[name][place], other[name][place])]
            total, count = total + 1, count + bool(found)
            if found and not first:
                told = [
                    f"  {OF_A_TOKEN[name]}: {told_as(one[name][place], other[name][place], names)}" for name in found
                ]
                first = f"{place_of(one)}, token {place} ({decode(token)!r}):\n" + "\n".join(told)
    return f"{first}\n  and so in {count - 1} more of {total} tokens of the step" if first else None


def place_of(line: Mapping[str, Any]) -> str:
    """Whose a sequence is, as its line says it."""
    named = {name: line.get(name) for name in ("env", "task", "group", "rollout", "agent")}
    return ", ".join(f"{name} {value}" for name, value in named.items() if value is not None)


def differing_metrics(one: Mapping[str, Any], other: Mapping[str, Any], names: tuple[str, str]) -> str | None:
    """The metrics that both have with different values, those of the update first; None where there is none."""
    common = [name for name in one if name in other and name != "step" and not name.startswith(("time/", "idle/"))]
    found = [name for name in common if not same(one[name], other[name])]
    if not found:
        return None
    found.sort(key=lambda name: OF_AN_UPDATE.index(name) if name in OF_AN_UPDATE else len(OF_AN_UPDATE))
    told = [f"{name}: {told_as(one[name], other[name], names)}" for name in found[:LISTED]]
    return "; ".join(told) + (f"; and {len(found) - LISTED} more metrics" if len(found) > LISTED else "")


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same; JSON has none for NaN and infinities, so these are null's like."""
    return one == other or (not is_number(one) and not is_number(other) and str not in (type(one), type(other)))


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def shown(value: Any) -> str:
    """A value; of a number as many digits as tell two of float32 apart."""
    return f"{value:.9g}" if isinstance(value, float) else "null" if value is None else str(value)


def told_as(one: Any, other: Any, names: tuple[str, str]) -> str:
    """Both values, each after its name."""
    as_text = shown if shown(one) != shown(other) else repr
    return f"{names[0]} {as_text(one)}, {names[1]} {as_text(other)}"


@dataclass(frozen=True)
class Gap:
    """How far apart the weights of two models are."""

    tensors: int
    """That differ; 0 = they are the same bit by bit."""
    of: int
    first: str
    """The first of them."""
    largest: float
    """Largest difference of one number."""
    at: str
    """The tensor that it is in."""
    relative: float
    """Norm of the difference over the norm of the weights."""

    def __str__(self) -> str:
        if not self.tensors:
            return f"the same bit by bit in {self.of} tensors"
        return (
            f"{self.tensors} of {self.of} tensors differ, {self.first} first: by at most {self.largest:.3g} (in "
            f"{self.at}), by {self.relative:.3g} of the weights' norm"
        )


def gap(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> Gap | None:
    """The gap between the tensors that both have by name; None where those of one name have different shapes."""
    common = [name for name in one if name in other]
    if not common or any(one[name].shape != other[name].shape for name in common):
        return None
    differ = [name for name in common if not same_bits(one[name], other[name].to(one[name].dtype))]
    squares = largest = 0.0
    at = ""
    for name in differ:
        difference = one[name].double() - other[name].to(one[name].device).double()
        squares += difference.square().sum().item()
        if not difference.abs().max().item() <= largest:  # NaN is larger than anything
            largest, at = difference.abs().max().item(), name
    norm = math.sqrt(sum(one[name].double().square().sum().item() for name in common))
    relative = math.sqrt(squares) / norm if norm else math.inf
    return Gap(len(differ), len(common), differ[0] if differ else "", largest, at or "".join(differ[:1]), relative)


def gap_to_file(side: Side, path: Path) -> Gap:
    """The gap between the weights of a file and those that a trainer has by now, in the file's number format."""
    try:
        recorded = load_file(path)
    except (SafetensorError, OSError) as error:
        raise PrlError(f"{path} does not hold weights: {error}") from error
    now = side.weights()
    if missing := sorted(recorded.keys() - now.keys()):
        raise PrlError(f"{path} has a tensor that the model has not: {missing[0]}")
    found = gap(recorded, {name: now[name].to("cpu", tensor.dtype) for name, tensor in recorded.items()})
    if found is None:
        raise PrlError(f"{path} has tensors of other shapes than the model")
    return found
