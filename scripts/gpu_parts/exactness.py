"""Logprobs, loss and gradients of packed rows and trees, by the trainer's own step, against transformers' plain
attention over each sequence alone."""

import contextlib
import functools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import flex_attention
from transformers import PretrainedConfig, PreTrainedModel

from gpu_parts import Row, bench_trainer, row
from prl.losses import LossCounts, compute_loss, count_members, default_loss
from prl.rollouts.messages import StepBatch, TrainingSample
from prl.rollouts.packing import pack_row
from prl.trainer.batch import stacks
from prl.trainer.ranks import meet
from prl.trainer.sharding import whole
from prl.trainer.trainer import Trainer
from prl.trainer.tree import flex, tree

BENCH = bench_trainer()
EXACT = 1e-5
"""By which float32 may differ: logprobs, the loss, and a gradient by the norm of its tensor."""
HALF_MOST, HALF_MEAN, HALF_RATIO = 0.1, 0.02, 1.5
"""By which logprobs in bfloat16 may differ from float32's, and how far gradients may be from float32's, against those
of plain attention in bfloat16."""
TOKENS = 8192
"""Of a row, at most."""
ALONE = 256
"""Tokens that sequences have in the mean here, from which on each attends alone on a GPU (`flex.LONG`)."""


@dataclass
class Found:
    logprobs: torch.Tensor
    """Of all trained tokens."""
    loss: float
    gradients: dict[str, torch.Tensor]


class Way(NamedTuple):
    name: str
    share: bool
    groups: bool
    """Whether the sequences are groups with common prompts, or long ones that share nothing."""
    on_gpu: bool
    """Whether rows attend so on a GPU; on a CPU that is without the kernels."""


WAYS = [
    Way("packed rows, a mask", False, True, False),
    Way("prefix trees, blocks", True, True, False),
    Way("packed rows, FlexAttention", False, True, True),
    Way("prefix trees, FlexAttention", True, True, True),
    Way("long sequences one by one", False, False, True),
]


def check(*, device: str, wide: bool) -> Iterator[Row]:
    """Rows for each way of attending in each number format; `wide` for a model of Qwen3-0.6B's width as well."""
    place = torch.device(device)
    meet(0, 1, place, {})
    for shape, groups in product(["tiny", "qwen3-0.6b"] if wide else ["tiny"], [True, False]):
        config = BENCH.config_of(shape)
        config.update({"num_hidden_layers": 2, "vocab_size": min(config.vocab_size, 32_000)})
        config.initializer_range = 0.8 / math.sqrt(config.hidden_size)  # else what is before a token hardly matters
        samples = draw(config.vocab_size, groups)
        logprobs = alone(config, samples, place, torch.float32).logprobs
        for sample, own in zip(samples, logprobs.split([sum(each.mask) for each in samples]), strict=True):
            sample.logprobs[-len(own) :] = (own - 0.05).tolist()  # ratios that are not 1
        exact, rounded = (alone(config, samples, place, dtype) for dtype in (torch.float32, torch.bfloat16))
        for way in WAYS:
            if way.groups == groups and (way.on_gpu or device == "cpu"):
                for half in (False, True):
                    title = f"{'bfloat16' if half else 'float32'}: {way.name}, two layers as {shape}'s"
                    try:
                        found = by_trainer(config, samples, place, way, half=half)
                        yield compared(title, found, exact, rounded if half else None)
                    except Exception as error:  # as of a kernel that a GPU has no room for: the others go on
                        yield row(title, f"{type(error).__name__}: {error}"[:300], "a step", False)
    dist.destroy_process_group()


def compared(title: str, found: Found, exact: Found, rounded: Found | None) -> Row:
    """The row of what was found in float32, or with `rounded`, plain attention's, in bfloat16."""
    gaps = (found.logprobs - exact.logprobs).abs()
    values = {"logprobs": gaps.max().item(), "mean": gaps.mean().item(), "loss": abs(found.loss - exact.loss)}
    values["gradients"] = distance(found, exact)
    limits = dict.fromkeys(values, EXACT)
    if rounded is not None:
        limits = {"logprobs": HALF_MOST, "mean": HALF_MEAN, "gradients": HALF_RATIO * distance(rounded, exact)}
    measured = ", ".join(f"{name} {value:.2g}" for name, value in values.items())
    expected = ", ".join(f"{name} {value:.2g}" for name, value in limits.items())
    return row(title, measured, expected, all(values[name] <= limit for name, limit in limits.items()), **values)


def distance(one: Found, other: Found) -> float:
    """The largest of their gradients' tensors, by the norm of the other's."""
    pairs = [(one.gradients[name], gradient) for name, gradient in other.gradients.items()]
    return max(((own - gradient).norm() / gradient.norm()).item() for own, gradient in pairs)


def draw(vocabulary: int, groups: bool) -> list[TrainingSample]:
    """Two groups of four whose prompts are longer than a block of attention, or three long sequences."""
    random.seed(0)
    prompts, completions = ((150, 150), (20, 40, 90, 130)) if groups else ((100, 200, 300), (160,))
    samples = []
    for prompt in prompts:
        shared = random.choices(range(vocabulary), k=prompt)
        samples += [BENCH.sample(shared + random.choices(range(vocabulary), k=k), prompt, 0.0) for k in completions]
    return samples


def alone(config: PretrainedConfig, samples: list[TrainingSample], device: torch.device, dtype: torch.dtype) -> Found:
    """By transformers' plain attention over each sequence, its full logits and autograd."""
    model = BENCH.make_model(config, TOKENS, device).to(dtype)
    model.set_attn_implementation("eager")
    parts = []
    for sample in samples:
        ids = torch.tensor(sample.token_ids, device=device)
        logp = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        parts += [torch.zeros(1, device=device), logp.gather(1, ids[1:, None]).squeeze(1)]
    logprobs = torch.cat(parts)
    (stack,) = stacks([pack_row(samples, TOKENS)], TOKENS, device)
    given = {"inference_logprobs": stack.logprobs, "loss_mask": stack.mask, "sequence_lengths": stack.sequence_lengths}
    given |= stack.streams
    counts = LossCounts.from_tensor(count_members(**given))
    loss, _ = compute_loss(trainer_logprobs=logprobs, counts=counts, rl_loss=[default_loss] * len(samples), **given)
    loss.backward()
    return Found(logprobs[stack.mask].detach(), loss.item(), gradients_of(model))


def by_trainer(
    config: PretrainedConfig, samples: list[TrainingSample], device: torch.device, way: Way, *, half: bool
) -> Found:
    """By the trainer's step, in bfloat16 over float32 weights with `half`."""
    model, rows = BENCH.make_model(config, TOKENS, device), [pack_row(samples, TOKENS)]
    options = {"share_prefixes": way.share, "tokens_per_forward": TOKENS, "max_grad_norm": 1e9, "device": device.type}
    trainer = Trainer(model=model, rl_losses={"": default_loss}, max_steps=10**6, half=half, **options)
    with contextlib.ExitStack() as patched:
        if way.on_gpu:
            trainer.layout = functools.partial(tree.tree_stacks, share=way.share)
            patched.enter_context(patch.object(flex, "LONG", ALONE))
            patched.enter_context(patch.object(tree, "row_tree", flex.row_on_gpu))
        if way.on_gpu and device.type == "cpu":  # whose kernel has no gradients
            patched.enter_context(patch.object(flex, "compiled", lambda: flex_attention))
            patched.enter_context(patch("torch.nn.attention.flex_attention._validate_device", lambda *_: None))
        logprobs = BENCH.in_order(model, trainer.layout(rows, TOKENS, device))
        metrics = trainer.train_step(StepBatch(1, rows, 0))
    mask = [on for sample in samples for on in sample.mask]
    return Found(logprobs[torch.tensor(mask, device=device)], metrics["loss/mean"], gradients_of(model))


def gradients_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: whole(each.grad).float() for name, each in model.named_parameters()}
