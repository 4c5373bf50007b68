"""Sequences that share tokens, and what a model makes of them, run as trees or each alone."""

import random

import numpy as np
import rounding
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from prl.losses import LossCounts, compute_loss, count_members, default_loss
from prl.models import model_path
from prl.rollouts.messages import TrainingSample, sequence_slices
from prl.rollouts.packing import pack_row
from prl.trainer.batch import stacks
from prl.trainer.model import check_layout, load_model, stack_logprobs
from prl.trainer.tree.tree import tree_stacks

CPU = torch.device("cpu")


def forked(rng: random.Random) -> list[TrainingSample]:
    """Sequences that fork on three levels, with all that makes tokens differ which are the same.

    By number: 0, 1 fork after two common parts; 2 within the second; 3 is a prefix of 0; 4 is 0 again, 5 is 0 at
    another temperature; 6 is 0 and one token; 7, 8 have nothing in common with them but 8 its first token; 9 trains
    nothing; 10 trains its prompt, which 0 does not; 11 is a single token.
    """

    def part(size: int) -> list[int]:
        return [rng.randrange(48, 58) for _ in range(size)]

    a, b, c = part(6), part(5), part(4)
    whole = [
        *(a + b + c, a + b + [60, *part(7)], a + b[:3] + [61, *part(2)], a + b, a + b + c, a + b + c),
        *(a + b + c + part(1), [62, *part(8)], [a[0], 63, *part(4)], a + [64, 65], a + [66, *part(2)], [67]),
    ]
    starts = [11, 11, 9, 8, 11, 13, 6, 4, 2, 99, 1, 1]
    return [
        TrainingSample(
            token_ids=ids,
            mask=[place >= start for place in range(len(ids))],
            logprobs=[rng.uniform(-3, -1) if place >= start else 0.0 for place in range(len(ids))],
            temperatures=[2.0 if number == 5 else 3.0] * len(ids),
            env_name="toy",
            reward=0.0,
            advantages=[rng.uniform(-1, 1) for _ in ids],
        )
        for number, (ids, start) in enumerate(zip(whole, starts, strict=True))
    ]


def feed(samples: list[TrainingSample], component: str, rng: random.Random) -> None:
    """Have the component alone train the tokens on the mask, or with "all" each component some."""
    for sample in samples:
        size = len(sample.token_ids)
        for name in ("rl", "ce", "ref_kl"):
            weights = [on * rng.choice([0.5, 1.0]) * (component in (name, "all")) for on in sample.mask]
            setattr(sample, f"{name}_weights", weights)
        sample.ref_logprobs = [rng.uniform(-3, -1) for _ in range(size)]
        if component == "all":  # a prompt token that others with the same prompt do not train
            sample.ce_weights[rng.randrange(size)] = 0.3


def gradient_of(model, samples, logprobs, entropy, rl_loss) -> dict[str, torch.Tensor]:
    """By parameter, of the loss of the samples one after the other."""
    size = max(256, sum(len(sample.token_ids) for sample in samples))
    (stack,) = stacks([pack_row(samples, size)], size, CPU)
    inputs = {"inference_logprobs": stack.logprobs, "loss_mask": stack.mask} | stack.streams
    loss, _ = compute_loss(
        trainer_logprobs=logprobs,
        sequence_lengths=stack.sequence_lengths,
        counts=LossCounts.from_tensor(count_members(sequence_lengths=stack.sequence_lengths, **inputs)),
        rl_loss=[rl_loss] * len(samples),
        entropy=entropy,
        **inputs,
    )
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def alone(model, samples) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs and entropy, `[tokens]`, from the full logits of each sequence; 0 where a sequence starts."""
    found = []
    for sample in samples:
        ids = torch.tensor(sample.token_ids)
        temperatures = torch.tensor(sample.temperatures)[1:, None]  # float32, as shipped
        logp = (model(input_ids=ids[None], use_cache=False).logits[0, :-1] / temperatures).log_softmax(-1)
        both = torch.stack([logp.gather(1, ids[1:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)])
        found.append(torch.nn.functional.pad(both, (1, 0)))
    logprobs, entropy = torch.cat(found, 1)
    return logprobs, entropy


def as_trees(model, samples, budget: int, *, share: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from token trees, in the order of the samples; 0 also where nothing wants a logprob."""
    lengths = [len(sample.token_ids) for sample in samples]
    parts, size = sequence_slices(lengths), max(256, sum(lengths))
    found = torch.zeros(2, sum(lengths), dtype=torch.promote_types(model.dtype, torch.float32))
    for stack in tree_stacks([pack_row(samples, size)], budget, CPU, share=share):
        both = torch.stack(stack_logprobs(model, stack, head_chunk=7))
        places = [torch.arange(sum(lengths))[parts[place]] for _, place in stack.origins]
        found = found.index_copy(1, torch.cat(places), both)
    return found[0], found[1]


def plain_model() -> torch.nn.Module:
    """The tiny policy as transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(model_path("tiny"), dtype=torch.float32, attn_implementation="sdpa")


def branched(rng: random.Random, tokens: int, longest: int) -> tuple[np.ndarray, list[int], list[list[int]]]:
    """A random row in the order of a walk: places on the path, starts of branches, and by token its path."""
    paths = [list(range(min(tokens, rng.randrange(1, longest))))]
    paths = [paths[0][: stop + 1] for stop in range(len(paths[0]))]
    starts = [0]
    while len(paths) < tokens:
        path = paths[-1][: rng.randrange(len(paths[-1]))]
        starts.append(len(paths))
        for _ in range(min(tokens - len(paths), rng.randrange(1, longest))):
            path = [*path, len(paths)]
            paths.append(path)
    return np.array([len(path) - 1 for path in paths]), starts, paths


def pairs(paths: list[list[int]], window: int | None) -> torch.Tensor:
    """bool `[tokens, tokens]`: which keys each token attends to."""
    seen = torch.zeros(len(paths), len(paths), dtype=torch.bool)
    for token, path in enumerate(paths):
        seen[token, path if window is None else path[-window:]] = True
    return seen


def windowed(folder, **changes) -> str:
    """A random model at `folder` whose layers but the first see four tokens."""
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    changes = {"use_sliding_window": True, "sliding_window": 4, "layer_types": kinds} | changes
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path("tiny"), **changes)).save_pretrained(folder)
    return str(folder)


def check_windowed(path: str) -> tuple[list[TrainingSample], torch.Tensor]:
    """Assert that trees of a model with windows have the logprobs and gradients of each sequence alone.

    Returns the sequences and these logprobs.
    """
    samples = forked(random.Random(1))
    model, plain = load_model(path, device=CPU), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    check_layout(model, tree_stacks)
    found, expected = as_trees(model, samples, 10_000)[0], alone(plain, samples)[0]
    assert (found - expected)[found != 0].abs().max() < rounding.of_model(plain, expected)
    gradients = [
        gradient_of(each, samples, logprobs, None, default_loss)
        for each, logprobs in ((model, found), (plain, expected))
    ]
    for name, gradient in gradients[1].items():
        assert (gradients[0][name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    return samples, expected
