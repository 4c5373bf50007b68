"""Numbers of a step's tokens by env, and their reduction over ranks."""

import msgspec
import torch
import torch.distributed as dist

from prl.losses import TokenTreatment
from prl.losses.interface import Metrics, add_metric, mismatch_kl, per_token
from prl.trainer.batch import Stack


@torch.no_grad()
def metrics_of_envs(stack: Stack, logprobs: torch.Tensor, entropy: torch.Tensor, treatment: TokenTreatment) -> Metrics:
    """Measure the tokens of a stack by env, as (sum, count).

    Args:
        stack: the stack, after the loss.
        logprobs: the trainer's, `[flat tokens]`.
        entropy: entropy of the trainer's distribution, nats, `[flat tokens]`, 0 where no logprob is wanted.
        treatment: the labels that the loss has filled in.

    Returns:
        `entropy` over tokens whose logprob is wanted, `mismatch_kl` over members of components that read the sampler,
        and `ref_kl`, reference minus trainer, over members of that component.
    """
    envs = list(dict.fromkeys(stack.envs))
    of_token = per_token([envs.index(env) for env in stack.envs], stack.sequence_lengths, logprobs.device)
    log_ratio = torch.where(treatment.sampled, logprobs - stack.logprobs, 0.0)
    pulled = [tokens for label, tokens in treatment.labels.items() if label.split()[0] == "ref_kl"]
    metrics: Metrics = {}
    for number, env in enumerate(envs):
        own = of_token == number
        sampled = own & treatment.sampled
        metrics[f"entropy/{env}/mean"] = (entropy[own & stack.wanted].double().sum(), (own & stack.wanted).sum())
        metrics[f"mismatch_kl/{env}/mean"] = (mismatch_kl(log_ratio[sampled]).sum(), sampled.sum())
        if pulled:
            members = own & torch.stack(pulled).any(0)
            gap = stack.streams["ref_logprobs"][members] - logprobs[members]
            metrics[f"ref_kl/{env}/mean"] = (gap.double().sum(), members.sum())
    return metrics


def means_over_ranks(metrics: Metrics, device: torch.device) -> dict[str, float]:
    """Return the means over all ranks. Their metrics may differ: an algorithm may have samples on one rank only."""
    sums: Metrics = {}
    for part in gather({name: (float(total), float(count)) for name, (total, count) in metrics.items()}, device):
        for name, pair in part.items():
            add_metric(sums, name, *pair)
    return {name: float(total / count) for name, (total, count) in sums.items() if count}


def gather(value: dict, device: torch.device) -> list[dict]:
    """Gather the `value` of every rank, as msgpack in tensors: torch's own gather of objects would unpickle."""
    if not dist.is_initialized():
        return [value]
    data = torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device))
    # A collective takes tensors of one length on all ranks.
    padded = torch.nn.functional.pad(data, (0, int(max(sizes)) - len(data)))
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return [msgspec.msgpack.decode(bytes(part[: int(size)].tolist())) for part, size in zip(parts, sizes, strict=True)]
