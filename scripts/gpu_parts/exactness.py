"""Logprobs, loss and gradients of packed rows and trees, by the trainer's own step, against transformers' plain
attention over each sequence alone."""

import functools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import flex_attention
from transformers import PretrainedConfig, PreTrainedModel

from gpu_parts import Row, bench_trainer, row
from prl.config.trainer import PRECISIONS, Precision
from prl.losses import LossCounts, compute_loss, count_members, default_loss
from prl.rollouts.messages import StepBatch, TrainingSample
from prl.rollouts.packing import pack_row
from prl.trainer.batch import stacks
from prl.trainer.ranks import meet
from prl.trainer.sharding import whole
from prl.trainer.trainer import Trainer
from prl.trainer.tree import flex, tree

BENCH = bench_trainer()
LIMITS = {
    "float32": {"logprobs": 1e-5, "mean": 1e-5, "loss": 1e-5, "gradients": 1e-5},
    "bfloat16": {"logprobs": 0.1, "mean": 0.02, "loss": 0.02, "gradients": 0.1},
}
"""By which numbers may differ: logprobs at most and in the mean, the loss, and a gradient by the norm of its tensor."""
TOKENS = 8192
"""Of a row, at most."""
LONG = 256
"""Tokens that sequences have here in the mean, from which on each attends alone on a GPU (`flex.LONG`)."""
WAYS = {
    "packed rows, FlexAttention": (False, (150, 150), (20, 40, 90, 130)),
    "prefix trees, FlexAttention": (True, (150, 150), (20, 40, 90, 130)),
    "long sequences one by one": (False, (100, 200, 300), (160,)),
}
"""How rows attend on a GPU: whether shared tokens run once; tokens of the prompts, and of the completions of each. A
CPU has no kernel with gradients: there FlexAttention is computed from all pairs of tokens."""


@dataclass
class Found:
    logprobs: torch.Tensor
    """Of all tokens; 0 where a token does not train."""
    loss: float
    gradients: dict[str, torch.Tensor]


def check(*, device: str, shapes: list[str]) -> Iterator[Row]:
    """Rows for each way to attend in each number format, of two layers of the models `shapes`."""
    place = torch.device(device)
    meet(0, 1, place, {})
    for shape, (name, (share, prompts, completions)) in product(shapes, WAYS.items()):
        config = BENCH.config_of(shape)
        config.update({"num_hidden_layers": 2, "vocab_size": min(config.vocab_size, 32_000)})
        config.initializer_range = 0.8 / math.sqrt(config.hidden_size)  # else what is before a token hardly matters
        samples = draw(config.vocab_size, prompts, completions)
        exact = alone(config, samples, place)
        for dtype in LIMITS:
            title = f"{dtype}: {name}, two layers as {shape}'s"
            try:
                yield compared(title, dtype, by_trainer(config, samples, place, share, PRECISIONS[dtype]), exact)
            except Exception as error:  # as of a kernel that a GPU has no room for: the others go on
                yield row(title, f"{type(error).__name__}: {error}"[:300], "a step", False)
    dist.destroy_process_group()


def compared(title: str, dtype: str, found: Found, exact: Found) -> Row:
    """The row of what was found in a number format."""
    gaps = (found.logprobs - exact.logprobs).abs()[exact.logprobs != 0]
    values = {"logprobs": gaps.max().item(), "mean": gaps.mean().item(), "loss": abs(found.loss - exact.loss)}
    values["gradients"] = max(
        ((found.gradients[name] - each).norm() / each.norm()).item() for name, each in exact.gradients.items()
    )
    measured = ", ".join(f"{name} {value:.1e}" for name, value in values.items())
    expected = "at most " + ", ".join(f"{limit:g}" for limit in LIMITS[dtype].values())
    return row(title, measured, expected, all(values[name] <= limit for name, limit in LIMITS[dtype].items()), **values)


def draw(vocabulary: int, prompts: Sequence[int], completions: Sequence[int]) -> list[TrainingSample]:
    """Random completions of random prompts, all of as many tokens as given."""
    random.seed(0)
    samples = []
    for prompt in prompts:
        shared = random.choices(range(vocabulary), k=prompt)
        samples += [
            BENCH.sample(shared + random.choices(range(vocabulary), k=k), prompt, -math.log(vocabulary))
            for k in completions
        ]
    return samples


def alone(config: PretrainedConfig, samples: list[TrainingSample], device: torch.device) -> Found:
    """By transformers' plain attention over each sequence in float32, its full logits and autograd."""
    model = BENCH.make_model(config, TOKENS, device)
    model.set_attn_implementation("eager")
    parts = []
    for sample in samples:
        ids = torch.tensor(sample.token_ids, device=device)
        logp = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        parts += [torch.zeros(1, device=device), logp.gather(1, ids[1:, None]).squeeze(1)]
    logprobs = torch.cat(parts)
    (stack,) = stacks([pack_row(samples, TOKENS)], TOKENS, device)
    given = {"inference_logprobs": stack.logprobs, "loss_mask": stack.mask, "sequence_lengths": stack.sequence_lengths}
    given |= stack.streams
    counts = LossCounts.from_tensor(count_members(**given))
    loss, _ = compute_loss(trainer_logprobs=logprobs, counts=counts, rl_loss=[default_loss] * len(samples), **given)
    loss.backward()
    return Found((logprobs * stack.mask).detach(), loss.item(), gradients_of(model))


def by_trainer(
    config: PretrainedConfig, samples: list[TrainingSample], device: torch.device, share: bool, precision: Precision
) -> Found:
    """By the trainer's step on a row that attends as on a GPU, in this number format over float32 weights."""
    model, rows = BENCH.make_model(config, TOKENS, device), [pack_row(samples, TOKENS)]
    options = {"tokens_per_forward": TOKENS, "max_grad_norm": 1e9, "device": device.type}
    trainer = Trainer(model=model, rl_losses={"": default_loss}, max_steps=10**6, precision=precision, **options)
    trainer.layout = functools.partial(tree.tree_stacks, share=share)
    with (
        patch.object(flex, "LONG", LONG),
        patch.object(tree, "row_tree", flex.row_on_gpu),
        patch.object(flex, "compiled", flex.compiled if device.type == "cuda" else lambda: flex_attention),
        patch("torch.nn.attention.flex_attention._validate_device", lambda *_: None),  # a CPU's kernel has no gradients
    ):
        logprobs = BENCH.in_order(model, trainer.layout(rows, TOKENS, device))
        metrics = trainer.train_step(StepBatch(1, rows, 0))
    return Found(logprobs, metrics["loss/mean"], gradients_of(model))


def gradients_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: whole(each.grad).float() for name, each in model.named_parameters()}
