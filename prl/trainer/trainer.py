"""Optimiser steps on a batch: micro-batches in, new weights and metrics out. No algorithm is known here."""

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from prl.base.errors import PrlError
from prl.config.build import build, plain
from prl.config.trainer import FLOAT32, AdamWConfig, Precision, TrainerConfig
from prl.losses import LossCounts, TokenTreatment, compute_loss, count_members, divergence_loss, ref_kl_loss
from prl.losses.interface import LossFunction, Metrics, add_metric
from prl.losses.options import options_of
from prl.rollouts.components import COMPONENTS
from prl.rollouts.messages import StepBatch
from prl.trainer.batch import Stack, empty_stack
from prl.trainer.entropy import controls_of
from prl.trainer.export import TokenExport
from prl.trainer.layers import compile_layers, recompute_activations
from prl.trainer.metrics import means_over_ranks, metrics_of_envs
from prl.trainer.model import run_stack, stack_logprobs
from prl.trainer.optim import make_optimizers
from prl.trainer.references import Heads, behind_prefixes, divergences, follow, kept_head
from prl.trainer.schedule import Schedule
from prl.trainer.sharding import gradient_norm, make_mesh, most, reduce_over_replicas, scale_gradients, shard
from prl.trainer.tree.tree import layout_of
from prl.transport.events import FORWARD, OPTIMISER, TRAINER, Track

if TYPE_CHECKING:
    from prl.rollouts.inputs import Picture
    from prl.rollouts.pictures import Features

# Names in `metrics.jsonl` that differ from the loss's own.
RENAMED = {"mismatch_kl": "mismatch_kl/all/mean", "logprob_gap": "logprob_gap/mean"}
# What is counted over a step: what `count_members` has, then the tokens with a logprob, then all.
COUNTED = (
    *(f"tokens/{name}" for name in (*COMPONENTS, "invalid_logprobs")),
    *("samples/rl", "tokens/trained", "tokens/forward"),
)


class Trainer:
    """Owns the model and its optimiser. `train_step` is the whole mathematics of a step.

    Args:
        model: the policy, on its device; of several ranks, on any: they share the weights that rank 0 has.
        rl_losses: the rl loss functions that sequences name; "" is the run's.
        max_steps: steps of the run, for the schedule.
        precision: number format of the model over its float32 weights; another one is for ranks, one at least.
        references: loads each model that samples name as their reference, by that name (`prl.trainer.references`).
        features: returns what the model's processor made of a picture; None = the model sees none.
        export: writes the use of each token of a step in the loss.
        track: records the phases of this rank's work.
        options: the fields of `TrainerConfig`. A subclass takes its own by keyword and passes the rest on.
    """

    Config = TrainerConfig

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        rl_losses: Mapping[str, LossFunction],
        max_steps: int,
        precision: Precision = FLOAT32,
        references: Mapping[str, Callable[[], PreTrainedModel]] | None = None,
        features: "Callable[[Picture], Features] | None" = None,
        export: TokenExport | None = None,
        track: Track | None = None,
        **options: Any,
    ):
        self.config = TrainerConfig(**options)
        self.model = model
        self.rl_losses = dict(rl_losses)
        options_of_losses = {name: options_of(loss) for name, loss in rl_losses.items()}
        self.entropy_controls = controls_of(options_of_losses)
        self.proximal = any(each.proximal for each in options_of_losses.values())
        self.between_updates = False
        """True in the midst of a batch with several updates: the weights are those of no step."""
        self.max_steps = max_steps
        self.precision = precision
        device = self.config.device
        self.device: torch.device = next(model.parameters()).device if device == "auto" else torch.device(device)
        self.mesh = make_mesh(self.device, self.config.shard_size) if dist.is_initialized() else None
        """Mesh of the ranks, where there are several, or one on a GPU."""
        recompute_activations(model, self.config.gradient_checkpointing)
        if self.config.compile:
            compile_layers(model)
        self.share(model)
        self.optimizer = make_optimizers(model, plain(self.config.optim or AdamWConfig()))
        self.peak_rates = [group["lr"] for group in self.optimizer.param_groups]
        self.schedule = build(
            self.config.schedule or {"_target_": "prl.trainer.schedule.Linear"}, Schedule, "trainer.schedule"
        )
        self.layout = layout_of(model, self.device, share=self.config.share_prefixes)
        self.features = features
        self.export = export
        self.track = track or Track(TRAINER)
        self.references: dict[str, PreTrainedModel] = {}
        for name, load in (references or {}).items():  # after the policy is spread: one whole model in memory at a time
            self.references[name] = load().requires_grad_(False).eval()
            self.share(self.references[name])
        # All were loaded with the base weights. Those that move begin as the policy.
        follow(self.references, model, 0)

    def share(self, model: PreTrainedModel) -> None:
        """Spread a model over the ranks, where there are any; rank 0 has its weights. A collective."""
        if self.mesh is not None:
            shard(model, self.mesh, self.device, precision=self.precision, offload=self.config.cpu_offload)

    def train_step(self, batch: StepBatch) -> dict[str, float]:
        """Take the optimiser steps of a batch on this rank's micro-batches. A collective.

        Args:
            batch: the rows of this rank, each with the update that it is for.

        Returns:
            Metrics, reduced over ranks. Means are over all updates, `grad_norm` too; counts are their sums.

        Raises ValueError for a sequence whose reference is not there, and PrlError, with the weights as they were
        before this update, for a gradient that is not finite.
        """
        self._check(batch)
        for name, control in self.entropy_controls.items():
            # A partial of a partial is flat, so that this does not grow with the steps.
            self.rl_losses[name] = functools.partial(self.rl_losses[name], **{"entropy_coef": control.applied})
        factor = self.schedule.factor(batch.step, self.max_steps)
        export = self.export if self.export is not None and self.export.wants(batch.step) else None
        totals: Metrics = {}
        counted: list[torch.Tensor] = []
        norms: list[float] = []
        parts: list[list[Stack]] = []
        updates = self.config.epochs * len({row.update for row in batch.micro_batches})
        for number in range(updates):
            with self.track.doing(FORWARD, batch.step):
                # Made once: later epochs train on the same stacks, with the logprobs before the first update.
                parts = parts or self._parts(batch)
                counted.append(self._accumulate(parts[number % len(parts)], batch.step, totals, export))
                if export is not None and number + 1 == updates:
                    export.write(batch)  # before the update, which raises on the very steps one wants to look at
            with self.track.doing(OPTIMISER, batch.step):
                norms.append(self._update(factor))
            self.between_updates = number + 1 < updates
        follow(self.references, self.model, batch.step)
        metrics = {RENAMED.get(name, name): value for name, value in means_over_ranks(totals, self.device).items()}
        for name, control in self.entropy_controls.items():
            env = name or "all"  # a loss of an env is named after it
            metrics[f"entropy_coef/{env}"] = control.applied
            if f"entropy_rl/{env}" in metrics:
                control.update(metrics[f"entropy_rl/{env}"])
        if self.config.epochs * self.config.updates_per_batch > 1:
            metrics["updates"] = float(updates)
        return metrics | {
            "loss/mean": sum(metrics.get(f"loss/{name}", 0.0) for name in COMPONENTS),
            "grad_norm": sum(norms) / updates,
            "lr": self.peak_rates[0] * factor,
            "samples/truncated": float(batch.truncated),
            **{name: float(count) for name, count in zip(COUNTED, torch.stack(counted).sum(0).tolist(), strict=True)},
        }

    def _accumulate(self, stacks: list[Stack], step: int, totals: Metrics, export: TokenExport | None) -> torch.Tensor:
        """Make the gradient of one update, with metrics added to `totals`. Returns its counts, as `COUNTED`."""
        asked = self._asked_references(stacks)
        # Before any backward: the loss is divided by the tokens of the whole step, those of other ranks too.
        counted = self._count(stacks)
        counts = LossCounts.from_tensor(counted[: len(COMPONENTS) + 2], step, self.max_steps)
        self.optimizer.zero_grad()
        for place, (stack, names) in enumerate(zip(stacks, asked, strict=True), 1):
            # Copies of the model add up once, with the last backward.
            reduce_over_replicas(self.model, place == len(stacks))
            stack, heads = self._with_references(stack, names)
            self._backward(stack, heads, counts, totals, export)
        return counted

    def _check(self, batch: StepBatch) -> None:
        """Raise ValueError for a sequence that asks for a reference that is not there, or with unseen pictures."""
        for row in batch.micro_batches:
            if row.pictures and self.features is None:
                raise ValueError(f"a sample has pictures, which {type(self.model).__name__} does not see")
            for reference in row.references:
                if reference.model and reference.model not in self.references:
                    raise ValueError(
                        f"a sample names the reference {reference.model!r}, which the trainer does not have: its "
                        "algorithm's trainer_references() must list it, as that of algo.kl does with a coef"
                    )

    def _parts(self, batch: StepBatch) -> list[list[Stack]]:
        """Make the stacks of this rank for each update, with p where a loss has `proximal`.

        All ranks have as many: their forwards and backwards are collectives.
        """
        parts = []
        for _, numbered in itertools.groupby(enumerate(batch.micro_batches), key=lambda place: place[1].update):
            rows = dict(numbered)
            own = list(self.layout(list(rows.values()), self.config.tokens_per_forward, self.device))
            (longest,) = most([len(own)], self.device)
            stacks_of_update = [self._in_batch(stack, min(rows)) for stack in own]
            stacks_of_update += [empty_stack(self.device) for _ in range(longest - len(own))]
            parts.append([self._with_proximal(stack) for stack in stacks_of_update])
        return parts

    def _in_batch(self, stack: Stack, first: int) -> Stack:
        """Return a stack of an update with the features of its pictures; `first` is its first row in the batch."""
        # The layout numbers the rows of an update from 0. Origins count in the whole batch.
        origins = [(first + number, place) for number, place in stack.origins]
        # Read once for each stack: later epochs and references see the same.
        features = {} if self.features is None else {each.features: self.features(each) for each in stack.pictures}
        return replace(stack, origins=origins, features=features)

    def _count(self, step_stacks: list[Stack]) -> torch.Tensor:
        """Count what `COUNTED` names over all micro-batches and ranks, in one collective; int64 on the CPU."""
        counted = []
        for stack in step_stacks:
            members = count_members(
                inference_logprobs=stack.logprobs,
                loss_mask=stack.mask,
                sequence_lengths=stack.sequence_lengths,
                **stack.streams,
            )
            counted.append([*members, stack.wanted.sum(), torch.tensor(stack.forward_tokens, device=self.device)])
        counts = torch.stack([torch.stack(row) for row in counted]).sum(0)
        if dist.is_initialized():
            dist.all_reduce(counts)
        return counts.cpu()

    def _backward(
        self, stack: Stack, heads: Heads, counts: LossCounts, totals: Metrics, export: TokenExport | None
    ) -> None:
        """Add one stack's gradient, its metrics to `totals`, and its tokens to the step's export."""
        chunk = self.config.head_chunk
        compare = functools.partial(divergences, stack=stack, heads=heads, chunk=chunk)
        logprobs, entropy, divergence = run_stack(self.model, stack, head_chunk=chunk, on_head=compare)
        kl = functools.partial(ref_kl_loss, **vars(self.config.ref_kl))
        dense = [divergence_loss if reference.divergence else kl for reference in stack.references]
        treatment = TokenTreatment()
        loss, metrics = compute_loss(
            trainer_logprobs=logprobs,
            inference_logprobs=stack.logprobs,
            loss_mask=stack.mask,
            sequence_lengths=stack.sequence_lengths,
            counts=counts,
            rl_loss=[self.rl_losses[name] for name in stack.losses],
            ref_kl_loss=kl if divergence is None else dense,
            treatment=treatment,
            entropy=entropy,
            divergence=divergence,
            **stack.streams,
        )
        loss.backward()
        if export is not None:
            export.add(stack, logprobs.detach(), treatment)
        if self.between_updates:  # this gap is of the weights that sampled, or should have
            metrics.pop("logprob_gap", None)
        entropy = entropy.detach()
        metrics["entropy/all/mean"] = (entropy.sum(dtype=torch.float64), stack.wanted.sum())
        metrics |= metrics_of_envs(stack, logprobs.detach(), entropy, treatment)
        for name in self.entropy_controls:
            members = stack.mask & stack.tokens_of([loss == name for loss in stack.losses])
            if "rl_weights" in stack.streams:
                members &= stack.streams["rl_weights"] != 0
            metrics[f"entropy_rl/{name or 'all'}"] = (entropy[members].double().sum(), members.sum())
        for name, pair in metrics.items():
            add_metric(totals, name, *pair)

    def _asked_references(self, step_stacks: list[Stack]) -> list[list[str]]:
        """Return the references that sequences of each stack name, on any rank: their forwards are collectives."""
        if not self.references:
            return [[] for _ in step_stacks]
        names = list(self.references)
        own: list[int] = []
        for stack in step_stacks:
            models = {reference.model for reference in stack.references}
            own += [int(name in models) for name in names]
        asked = torch.tensor(most(own, self.device)).view(len(step_stacks), len(names))
        return [list(itertools.compress(names, row)) for row in asked.tolist()]

    @torch.no_grad()
    def _with_proximal(self, stack: Stack) -> Stack:
        """Return the stack with the policy's logprobs as they are now, where a loss asks for them."""
        if not self.proximal:
            return stack
        logprobs, _ = stack_logprobs(self.model, stack, head_chunk=self.config.head_chunk)
        return replace(stack, streams=stack.streams | {"proximal_logprobs": logprobs})

    @torch.no_grad()
    def _with_references(self, stack: Stack, names: list[str]) -> tuple[Stack, Heads]:
        """Return the stack with the logprobs of these references, in the sequences that name them, and their heads."""
        heads: Heads = {}
        if not names:
            return stack, heads
        seen, places = behind_prefixes(stack, self.layout)
        filled = stack.streams.get("ref_logprobs", torch.zeros_like(stack.logprobs))
        for name in names:
            keep = functools.partial(kept_head, stack=stack, seen=seen, places=places, name=name)
            logprobs, _, heads[name] = run_stack(
                self.references[name], seen, head_chunk=self.config.head_chunk, on_head=keep
            )
            asking = stack.tokens_of([reference.model == name for reference in stack.references])
            filled = torch.where(asking, logprobs[places], filled)
        return replace(stack, streams=stack.streams | {"ref_logprobs": filled}), heads

    def _update(self, factor: float) -> float:
        """Clip the gradient, and step at `factor` of the peak learning rate. Returns the norm."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        norm = gradient_norm(parameters, self.mesh)
        if not math.isfinite(norm):
            raise PrlError(
                f"the gradient's norm is {norm}: weights were left as they were. "
                "Lower trainer.optim.lr, or look at the last batch's logprobs (orchestrator.keep_batches=true)"
            )
        scale = self.config.max_grad_norm / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_ has it
        if scale < 1:
            scale_gradients(parameters, scale)
        for group, rate in zip(self.optimizer.param_groups, self.peak_rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.step()
        return norm
