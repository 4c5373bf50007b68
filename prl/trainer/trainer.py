"""One optimiser step: micro-batches in, new weights and metrics out. Algorithm-blind."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from prl.config.instantiate import build
from prl.errors import PrlError
from prl.trainer.batch import Stack, stacks
from prl.trainer.config import TrainerConfig
from prl.trainer.export import TokenExport
from prl.trainer.loss import LossCounts, TokenFates, compute_loss, count_members
from prl.trainer.loss.run import LossFunction
from prl.trainer.metrics import Totals
from prl.trainer.model import stack_logprobs
from prl.trainer.optim import make_optimizer
from prl.trainer.schedule import Schedule
from prl.trainer.shared_prefix import can_share_prompts, shared_stacks
from prl.wire.components import COMPONENTS
from prl.wire.messages import StepBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Names in `metrics.jsonl` that differ from the loss's own.
RENAMED = {"mismatch_kl": "mismatch_kl/all/mean", "logprob_gap": "logprob_gap/mean"}


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
        model: "PreTrainedModel",
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
        """Set by the worker under `trainer.token_export`."""

    def train_step(self, batch: StepBatch) -> dict[str, float]:
        """One optimiser step on this rank's micro-batches. Returns the step's metrics, reduced over ranks.

        Raises ValueError for a sequence whose rl loss is not among `rl_losses`, and PrlError, with the weights as they
        were, for a gradient that is not finite.
        """
        self._check_losses(batch)
        step_stacks = list(self.layout(batch.micro_batches, self.config.tokens_per_forward, self.device))
        members = self._count(step_stacks)
        counts = LossCounts.from_tensor(members)
        totals = Totals()
        self.optimizer.zero_grad(set_to_none=True)
        for stack in step_stacks:
            self._backward(stack, counts, totals)
        if self.export is not None:  # before the update, which raises on the very steps one wants to look at
            self.export.write(batch)
        factor = self.schedule.factor(batch.step, self.max_steps)
        grad_norm = self._update(factor)
        metrics = {RENAMED.get(name, name): value for name, value in totals.reduce(self.device).items()}
        metrics["loss/mean"] = sum(metrics.get(f"loss/{name}", 0.0) for name in COMPONENTS)
        metrics |= {f"tokens/{name}": float(count) for name, count in zip(COMPONENTS, members.tolist(), strict=False)}
        metrics |= {
            "grad_norm": grad_norm,
            "lr": self.peak_rates[0] * factor,
            "tokens/invalid_logprobs": float(counts.invalid),
            "samples/truncated": float(batch.truncated),
        }
        return metrics

    def _check_losses(self, batch: StepBatch) -> None:
        for row in batch.micro_batches:
            for env, name in zip(row.env_names, row.losses, strict=True):
                if name not in self.rl_losses:
                    known = ", ".join(map(repr, self.rl_losses))
                    raise ValueError(
                        f"env {env!r}: a sample names the rl loss {name!r}, but the trainer has only {known}"
                    )

    def _count(self, step_stacks: list[Stack]) -> torch.Tensor:
        """`count_members` over all micro-batches and ranks, in one collective, on the CPU."""
        counts = torch.zeros(len(COMPONENTS) + 1, dtype=torch.int64, device=self.device)
        for stack in step_stacks:
            weights = {component.stream: stack.streams[component.stream] for component in COMPONENTS.values()}
            counts += count_members(
                inference_logprobs=stack.logprobs, loss_mask=stack.mask, sequence_lengths=None, **weights
            )
        if dist.is_initialized():
            dist.all_reduce(counts)
        return counts.cpu()

    def _backward(self, stack: Stack, counts: LossCounts, totals: Totals) -> None:
        """Add one stack's gradient, and its metrics to `totals`."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            logprobs, entropy = stack_logprobs(self.model, stack, head_chunk=self.config.head_chunk)
        logprobs = logprobs.flatten()[stack.flat]
        fates = None if self.export is None else TokenFates()
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
        if self.export is not None and fates is not None:
            self.export.add(stack, logprobs.detach(), fates)
        totals.add_all(metrics)
        totals.add("entropy/all/mean", entropy.sum(), stack.wanted.sum())
        totals.add_count("tokens/trained", stack.wanted.sum())
        totals.add_count("tokens/forward", stack.flat.numel())

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
