"""Sampling from a transformers model, and scoring with it: token ids in, token ids and logprobs out."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from prl.engines.replies import Scored
from prl.rollouts.inputs import Picture
from prl.rollouts.pictures import joined

if TYPE_CHECKING:
    from prl.rollouts.pictures import Features

Decode = Callable[..., str]
"""A tokenizer's `decode`."""
Shown = Sequence[tuple[Picture, "Features"]]
"""The pictures in a sequence, in their order, each with what the model's processor made of it."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """`n` continuations of one prompt. The fields are those sampling parameters of servers that leave all tokens in."""

    prompt_ids: list[int]
    n: int = 1
    max_tokens: int
    temperature: float = 1.0
    seed: int = 0
    stop_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    top_k: int = 0
    """Likeliest tokens that are drawn from; 0 or below = all."""
    top_p: float = 1.0
    """Of these the likeliest ones, until they have this share of the probability."""
    skip_special_tokens: bool = True
    pictures: Shown = ()


@dataclass
class Continuation:
    """One sequence that is sampled. What ends it stays in it."""

    request: Request
    uniform: list[float]
    """A random number for each token: it is the same token whatever is sampled beside it."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None

    def take(self, token_id: int, logprob: float, decode: Decode) -> None:
        """Add a token, and end where it is the last one."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if token_id in self.request.stop_token_ids or self._has_stop(decode):
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.request.max_tokens:
            self.finish_reason = "length"

    def _has_stop(self, decode: Decode) -> bool:
        if not self.request.stop:
            return False
        text = decode(self.token_ids, skip_special_tokens=self.request.skip_special_tokens)
        return any(stop in text for stop in self.request.stop)


@torch.inference_mode()
def sample(
    model: PreTrainedModel, requests: Sequence[Request], decode: Decode, check: Callable[[], None] = lambda: None
) -> list[list[Continuation]]:
    """The continuations of each request. `check` is called before each token; what it raises ends them all.

    A prompt is computed once for all of its continuations, and a continuation that has ended leaves the batch.
    """
    groups = [continuations_of(request) for request in requests]
    running = [continuation for group in groups for continuation in group]
    rows = torch.tensor([row for row, group in enumerate(groups) for _ in group], device=model.device)
    # Prompts end in the same column, so that the next token of all of them comes from the last one.
    input_ids, mask = padded([request.prompt_ids for request in requests], model.device, left=True)
    inputs = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    inputs |= picture_inputs(model, input_ids, mask, [request.pictures for request in requests])
    last = inputs["position_ids"].amax(-1)
    if last.dim() == 2:  # three positions a token; behind a picture the largest of them counts on
        last = last.amax(0)
    output = model(input_ids, attention_mask=mask, use_cache=True, logits_to_keep=1, **inputs)
    while True:
        check()
        token_ids, logprobs = draw(output.logits[rows, -1].float(), running)
        for continuation, token_id, logprob in zip(running, token_ids.tolist(), logprobs.tolist(), strict=True):
            continuation.take(token_id, logprob, decode)
        kept = [place for place, continuation in enumerate(running) if continuation.finish_reason is None]
        if not kept:
            return groups
        running, rows = [running[place] for place in kept], rows[kept]
        cache = output.past_key_values
        cache.batch_select_indices(rows)
        mask = torch.cat([mask[rows], mask.new_ones(len(rows), 1)], dim=1)
        last = last[rows] + 1
        output = model(
            token_ids[kept][:, None],
            attention_mask=mask,
            position_ids=last[:, None],
            past_key_values=cache,
            use_cache=True,
        )
        # From now on each continuation has a row of its own: before they shared that of their prompt.
        rows = torch.arange(len(kept), device=model.device)


def continuations_of(request: Request) -> list[Continuation]:
    """The continuations of a request, each with random numbers from a seed of its own, as servers count them."""
    result = []
    for number in range(request.n):
        generator = torch.Generator().manual_seed(request.seed + number)
        # In float64, as the cumulated probabilities: float32 would never draw the rarest tokens.
        uniform = torch.rand(request.max_tokens, generator=generator, dtype=torch.float64)
        result.append(Continuation(request, uniform.tolist()))
    return result


def draw(logits: Tensor, continuations: Sequence[Continuation]) -> tuple[Tensor, Tensor]:
    """The next token of each continuation and its logprob, `[continuations]` both, from logits `[…, vocabulary]`."""
    # With NaN `searchsorted` would draw some token or other, without an error.
    if not logits.isfinite().all():
        raise ValueError("the model's logits are not finite")
    temperatures = [each.request.temperature or 1.0 for each in continuations]
    logits = logits / torch.tensor(temperatures, device=logits.device)[:, None]
    logprobs = logits.log_softmax(-1)
    for row, continuation in enumerate(continuations):
        request = continuation.request
        if request.temperature and (request.top_k > 0 or request.top_p < 1):
            logprobs[row] = truncated(logprobs[row], request)
    cumulated = logprobs.double().exp().cumsum(-1)
    numbers = [each.uniform[len(each.token_ids)] for each in continuations]
    uniform = torch.tensor(numbers, dtype=torch.float64, device=logits.device)
    greedy = torch.tensor([each.request.temperature == 0 for each in continuations], device=logits.device)
    # From the right: a token of probability 0 is never drawn.
    drawn = torch.searchsorted(cumulated, uniform[:, None] * cumulated[:, -1:], right=True).squeeze(1)
    token_ids = torch.where(greedy, logits.argmax(-1), drawn.clamp(max=logits.shape[-1] - 1))
    return token_ids, logprobs.gather(1, token_ids[:, None]).squeeze(1)


def truncated(logprobs: Tensor, request: Request) -> Tensor:
    """Return logprobs `[vocabulary]` among the tokens alone that `top_k` and `top_p` leave, as servers do."""
    ordered, token_ids = logprobs.sort(descending=True)
    if request.top_k > 0:
        ordered[request.top_k :] = -math.inf
    shares = ordered.softmax(-1)
    ordered[shares.cumsum(-1) - shares >= request.top_p] = -math.inf  # not the first, before which there is nothing
    return torch.empty_like(logprobs).scatter_(0, token_ids, ordered.log_softmax(-1))


@torch.inference_mode()
def score(
    model: PreTrainedModel, sequences: Sequence[list[int]], top_k: Sequence[int], pictures: Sequence[Shown] = ()
) -> list[Scored]:
    """Each sequence, with its `pictures`, and as many of the most likely tokens as `top_k` says for it."""
    input_ids, mask = padded(sequences, model.device)
    inputs = picture_inputs(model, input_ids, mask, pictures)
    logits = model(input_ids, attention_mask=mask, use_cache=False, **inputs).logits[:, :-1].float()
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(2, input_ids[:, 1:, None]).squeeze(2).tolist()
    scored = []
    for row, (sequence, count) in enumerate(zip(sequences, top_k, strict=True)):
        stop = len(sequence) - 1
        values, ids = logprobs[row, :stop].topk(count)
        scored.append(Scored([0.0, *own[row][:stop]], [[], *ids.tolist()], [[], *values.tolist()]))
    return scored


def padded(sequences: Sequence[list[int]], device: torch.device, *, left: bool = False) -> tuple[Tensor, Tensor]:
    """Sequences as rows of one length, and a mask of their tokens. With `left` they end in the same column."""
    width = max(map(len, sequences))
    input_ids = torch.zeros(len(sequences), width, dtype=torch.int64)
    mask = torch.zeros_like(input_ids)
    for row, sequence in enumerate(sequences):
        begin = width - len(sequence) if left else 0
        input_ids[row, begin : begin + len(sequence)] = torch.tensor(sequence)
        mask[row, begin : begin + len(sequence)] = 1
    return input_ids.to(device), mask.to(device)


def picture_inputs(model: Any, input_ids: Tensor, mask: Tensor, pictures: Sequence[Shown]) -> dict[str, Tensor]:
    """Return what a model takes beside tokens: features of the pictures, and positions where these change them.

    Nothing where no sequence has a picture.

    Args:
        model: The model.
        input_ids: Sequences as `[rows, columns]`.
        mask: 1 for their tokens, 0 for padding, of the same shape.
        pictures: Of each sequence.
    """
    features = [made for shown in pictures for _, made in shown]
    if not features:
        return {}
    inputs = {name: torch.from_numpy(values).to(model.device) for name, values in joined(features).items()}
    if not hasattr(model.base_model, "get_rope_index"):
        return inputs
    kinds = torch.zeros_like(input_ids)
    for row, (begin, shown) in enumerate(zip(mask.argmax(1).tolist(), pictures, strict=True)):
        for picture, _ in shown:
            kinds[row, begin + picture.start : begin + picture.stop] = 1
    grid = inputs["image_grid_thw"]
    inputs["position_ids"], _ = model.base_model.get_rope_index(
        input_ids, kinds, image_grid_thw=grid, attention_mask=mask
    )
    return inputs
