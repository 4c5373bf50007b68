"""One optimiser step: micro-batches in, new weights and metrics out. Algorithm-blind."""

import torch
import torch.distributed as dist

from prl.errors import PrlError
from prl.trainer.batch import Stack, stacks
from prl.trainer.config import OptimConfig, TrainerConfig
from prl.trainer.export import TokenExport
from prl.trainer.loss import LossCounts, TokenFates, compute_loss, count_members
from prl.trainer.metrics import Totals
from prl.trainer.model import token_logprobs
from prl.trainer.schedule import lr_factor
from prl.trainer.shared_prefix import can_share_prompts, shared_stacks
from prl.wire import StepBatch

# Names in `metrics.jsonl` that differ from the loss's own.
RENAMED = {"mismatch_kl": "mismatch_kl/all/mean", "logprob_gap": "logprob_gap/mean"}


class Trainer:
    """Owns the model and its optimiser. `train_step` is the whole mathematics of a step."""

    def __init__(self, config: TrainerConfig, model: torch.nn.Module, rl_loss, *, max_steps: int, autocast: bool):
        self.config = config
        self.model = model
        self.rl_loss = rl_loss
        self.max_steps = max_steps
        self.autocast = autocast
        self.device = model.device
        self.optimizer = make_optimizer(model, config.optim)
        self.layout = shared_stacks if config.share_prompts and can_share_prompts(model) else stacks
        self.export: TokenExport | None = None
        """Set by the process under `monitor.token_export`."""

    def train_step(self, batch: StepBatch) -> dict[str, float]:
        """One optimiser step on this rank's micro-batches. Returns the step's metrics, reduced over ranks."""
        groups = list(self.layout(batch.micro_batches, self.config.tokens_per_forward, self.device))
        members = self._count(groups)
        counts = LossCounts.from_tensor(members)
        totals = Totals()
        self.optimizer.zero_grad(set_to_none=True)
        for group in groups:
            self._backward(group, counts, totals)
        if self.export is not None:  # before the update, which raises on the very steps one wants to look at
            self.export.write(batch)
        lr = self.config.optim.lr * lr_factor(batch.step, self.max_steps, self.config.schedule)
        grad_norm = self._update(lr)
        metrics = {RENAMED.get(name, name): value for name, value in totals.reduce(self.device).items()}
        metrics["loss/mean"] = sum(metrics.get(f"loss/{name}", 0.0) for name in ("rl", "ce", "ref_kl"))
        rl, ce, ref_kl, _ = members.tolist()
        metrics |= {
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens/rl": float(rl),
            "tokens/ce": float(ce),
            "tokens/ref_kl": float(ref_kl),
            "tokens/invalid_logprobs": float(counts.invalid),
            "samples/truncated": float(batch.truncated),
        }
        return metrics

    def _count(self, groups: list[Stack]) -> torch.Tensor:
        """`count_members` over all micro-batches and ranks, in one collective, and brought here in one sync."""
        names = ("rl_weights", "ce_weights", "ref_kl_weights")
        counts = torch.zeros(4, dtype=torch.int64, device=self.device)
        for group in groups:
            streams = {name: group.streams[name] for name in names}
            counts += count_members(inference_logprobs=group.logprobs, loss_mask=group.mask, **streams)
        if dist.is_initialized():
            dist.all_reduce(counts)
        return counts.cpu()

    def _backward(self, group: Stack, counts: LossCounts, totals: Totals) -> None:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            logprobs, entropy = token_logprobs(
                self.model,
                group.input_ids,
                group.position_ids,
                group.temperatures,
                group.wanted,
                head_chunk=self.config.head_chunk,
                previous=group.previous,
                attention=group.attention,
            )
        logprobs = logprobs.flatten()[group.flat]
        fates = None if self.export is None else TokenFates()
        loss, metrics = compute_loss(
            trainer_logprobs=logprobs,
            inference_logprobs=group.logprobs,
            loss_mask=group.mask,
            sequence_lengths=group.sequence_lengths,
            counts=counts,
            rl_loss=self.rl_loss,
            fates=fates,
            **group.streams,
        )
        loss.backward()
        if self.export is not None:
            self.export.add(group, logprobs.detach(), fates)
        totals.add_all(metrics)
        totals.add("entropy/all/mean", entropy.sum(), group.wanted.sum())
        totals.add_count("tokens/trained", group.wanted.sum())
        totals.add_count("tokens/forward", group.flat.numel())

    def _update(self, lr: float) -> float:
        """Sum gradients over ranks (the loss is already divided by global counts), clip, step. Returns the norm."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if dist.is_initialized():
            for parameter in parameters:
                if parameter.grad is None:  # untouched on this rank (an expert, say), maybe not on another
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.optim.max_grad_norm)
        if not torch.isfinite(norm):
            raise PrlError(
                f"the gradient's norm is {norm.item()}: weights were left as they were. "
                "Lower trainer.optim.lr, or look at the last batch's logprobs (orchestrator.keep_batches=true)"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return norm.item()


def make_optimizer(model: torch.nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=tuple(config.betas), eps=config.eps, fused=True)
