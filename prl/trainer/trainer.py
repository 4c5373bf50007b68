"""One optimiser step: micro-batches in, new weights and metrics out. Algorithm-blind."""

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from prl.config.instantiate import build, factory, plain
from prl.errors import PrlError
from prl.trainer.batch import Stack, shared_stacks, stacks
from prl.trainer.config import OptimConfig, TrainerConfig
from prl.trainer.export import TokenExport
from prl.trainer.loss import LossCounts, TokenFates, compute_loss, count_members
from prl.trainer.loss.interface import LossFunction, Metrics, add_metric
from prl.trainer.model import can_share_prompts, stack_logprobs
from prl.trainer.schedule import Schedule
from prl.wire.components import COMPONENTS
from prl.wire.messages import StepBatch

# Names in `metrics.jsonl` that differ from the loss's own.
RENAMED = {"mismatch_kl": "mismatch_kl/all/mean", "logprob_gap": "logprob_gap/mean"}
# What is counted over a step: the members of each component first, then the tokens with a logprob, then all.
COUNTED = (*COMPONENTS, "invalid_logprobs", "trained", "forward")


class Trainer:
    """Owns the model and its optimiser. `train_step` is the whole mathematics of a step.

    Args:
        model: the policy, on its device.
        rl_losses: the rl loss functions that sequences name; "" is the run's.
        max_steps: steps of the run, for the schedule.
        autocast: run the model in bfloat16 over its float32 weights.
        knobs: the fields of `TrainerConfig`. A subclass takes its own by keyword and passes the rest on.
    """

    Config = TrainerConfig

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        rl_losses: Mapping[str, LossFunction],
        max_steps: int,
        autocast: bool,
        **knobs: Any,
    ):
        self.config = TrainerConfig(**knobs)
        self.model = model
        self.rl_losses = rl_losses
        self.max_steps = max_steps
        self.autocast = autocast
        self.device: torch.device = next(model.parameters()).device
        if self.config.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        self.optimizer = make_optimizer(model, self.config.optim)
        self.peak_rates = [group["lr"] for group in self.optimizer.param_groups]
        self.schedule = build(self.config.schedule, Schedule, "trainer.schedule")
        self.layout = shared_stacks if self.config.share_prompts and can_share_prompts(model) else stacks
        self.export: TokenExport | None = None
        """Set by the worker under `trainer.token_export` and `trainer.example_steps`."""

    def train_step(self, batch: StepBatch) -> dict[str, float]:
        """One optimiser step on this rank's micro-batches. Returns the step's metrics, reduced over ranks.

        Raises ValueError for a sequence whose rl loss is not among `rl_losses`, and PrlError, with the weights as they
        were, for a gradient that is not finite.
        """
        for row in batch.micro_batches:
            for env, name in zip(row.env_names, row.losses, strict=True):
                if name not in self.rl_losses:
                    raise ValueError(
                        f"env {env!r}: a sample names the rl loss {name!r}, but the trainer has only "
                        + ", ".join(map(repr, self.rl_losses))
                    )
        step_stacks = list(self.layout(batch.micro_batches, self.config.tokens_per_forward, self.device))
        tokens = self._count(step_stacks)
        counts = LossCounts.from_tensor(tokens[: len(COMPONENTS) + 1])
        totals: Metrics = {}
        export = self.export if self.export is not None and self.export.wants(batch.step) else None
        self.optimizer.zero_grad(set_to_none=True)
        for stack in step_stacks:
            self._backward(stack, counts, totals, export)
        if export is not None:  # before the update, which raises on the very steps one wants to look at
            export.write(batch)
        factor = self.schedule.factor(batch.step, self.max_steps)
        grad_norm = self._update(factor)
        metrics = {RENAMED.get(name, name): value for name, value in means_over_ranks(totals, self.device).items()}
        return metrics | {
            "loss/mean": sum(metrics.get(f"loss/{name}", 0.0) for name in COMPONENTS),
            "grad_norm": grad_norm,
            "lr": self.peak_rates[0] * factor,
            "samples/truncated": float(batch.truncated),
            **{f"tokens/{name}": float(count) for name, count in zip(COUNTED, tokens.tolist(), strict=True)},
        }

    def _count(self, step_stacks: list[Stack]) -> torch.Tensor:
        """Tokens by `COUNTED` over all micro-batches and ranks, in one collective, int64 on the CPU."""
        counted = [
            [
                *count_members(
                    inference_logprobs=stack.logprobs, loss_mask=stack.mask, sequence_lengths=None, **stack.streams
                ),
                stack.wanted.sum(),
                torch.tensor(stack.flat.numel(), device=self.device),
            ]
            for stack in step_stacks
        ]
        counts = torch.stack([torch.stack(row) for row in counted]).sum(0)
        if dist.is_initialized():
            dist.all_reduce(counts)
        return counts.cpu()

    def _backward(self, stack: Stack, counts: LossCounts, totals: Metrics, export: TokenExport | None) -> None:
        """Add one stack's gradient, its metrics to `totals`, and its tokens to the step's export."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            logprobs, entropy = stack_logprobs(self.model, stack, head_chunk=self.config.head_chunk)
        logprobs = logprobs.flatten()[stack.flat]
        fates = None if export is None else TokenFates()
        loss, metrics = compute_loss(
            trainer_logprobs=logprobs,
            inference_logprobs=stack.logprobs,
            loss_mask=stack.mask,
            sequence_lengths=stack.sequence_lengths,
            counts=counts,
            rl_loss=[self.rl_losses[name] for name in stack.losses],
            fates=fates,
            **stack.streams,
        )
        loss.backward()
        if export is not None and fates is not None:
            export.add(stack, logprobs.detach(), fates)
        metrics["entropy/all/mean"] = (entropy.sum(), stack.wanted.sum())
        for name, pair in metrics.items():
            add_metric(totals, name, *pair)

    def _update(self, factor: float) -> float:
        """Sum gradients over ranks, clip, and step at `factor` of the peak learning rate. Returns the norm.

        Summing is right because the loss is already divided by counts of all ranks.
        """
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if dist.is_initialized():
            for parameter in parameters:
                if parameter.grad is None:  # unused on this rank (an expert, say), maybe not on another
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm)
        if not torch.isfinite(norm):
            raise PrlError(
                f"the gradient's norm is {norm.item()}: weights were left as they were. "
                "Lower trainer.optim.lr, or look at the last batch's logprobs (orchestrator.keep_batches=true)"
            )
        for group, rate in zip(self.optimizer.param_groups, self.peak_rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.step()
        return norm.item()


def make_optimizer(model: torch.nn.Module, node: OptimConfig | Mapping[str, Any]) -> torch.optim.Optimizer:
    """The optimiser that `node` names, over the trainable parameters; its weight decay is for matrices only.

    Args:
        model: the policy.
        node: an `OptimConfig`, or its keys and values with further settings of the chosen class.

    Raises ConfigError for a class that is not an optimiser, and for settings that it does not take.
    """
    config = OptimConfig()  # which tells its defaults from given settings; further settings are attributes
    vars(config).update(plain(node))
    make = factory(config, torch.optim.Optimizer, "trainer.optim")
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices = {"params": [p for p in parameters if p.dim() >= 2]}
    others = {"params": [p for p in parameters if p.dim() < 2]}
    return make([matrices, others | ({"weight_decay": 0.0} if "weight_decay" in make.keywords else {})])


def means_over_ranks(metrics: Metrics, device: torch.device) -> dict[str, float]:
    """The means over all ranks, whose names may differ: an algorithm may have samples on one rank only."""
    sums: Metrics = {}
    for part in _gather({name: (float(total), float(count)) for name, (total, count) in metrics.items()}, device):
        for name, pair in part.items():
            add_metric(sums, name, *pair)
    return {name: float(total / count) for name, (total, count) in sums.items() if count}


def _gather(value: dict, device: torch.device) -> list[dict]:
    """`value` of every rank, as msgpack bytes in tensors (torch's own object gather would pickle)."""
    if not dist.is_initialized():
        return [value]
    data = torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device))
    padded = torch.nn.functional.pad(data, (0, int(max(sizes)) - len(data)))
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return [msgspec.msgpack.decode(bytes(part[: int(size)].tolist())) for part, size in zip(parts, sizes, strict=True)]
