"""The models that clients train: adapters beside one base, each with its own optimiser, gradient and step.

A model of a client without an adapter is the base itself with all of its weights; then it is the only one.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from prl.losses.interface import LossFunction, Metrics, add_metric
from prl.rollouts.messages import Reference
from prl.tinker import adapters, losses
from prl.tinker.wire import Adam, Datum, Forward, Lora, RequestError
from prl.trainer.batch import Stack
from prl.trainer.lora import adapters_of, linear_layers
from prl.trainer.model import run_stack
from prl.trainer.sharding import gradient_norm, scale_gradients

ALPHA = 32
"""Scale of an adapter, W + ALPHA / rank * B A, that of the hosted service."""


@dataclass
class Tenant:
    """A model of a client."""

    adapter: str | None
    """Name of its adapter; None = it has all weights."""
    parameters: dict[str, torch.nn.Parameter]
    """What is trained, by its names in files."""
    optimizer: torch.optim.AdamW = field(init=False)
    step: int = 0
    """Optimiser steps so far."""

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters.values())


class Learner:
    """Trains the models of all clients, one request after the other.

    Args:
        load: loads the base, on its device.
        tokens_per_forward: tokens that go through the model together, padding included.
        longest: tokens of the longest sequence.
    """

    def __init__(
        self,
        load: Callable[[], PreTrainedModel],
        *,
        tokens_per_forward: int,
        longest: int,
    ):
        self.load = load
        self.tokens_per_forward, self.longest = tokens_per_forward, longest
        self.tenants: dict[str, Tenant] = {}
        self.made = 0
        self._begin()

    def _begin(self) -> None:
        """Load the base."""
        self.model: Any = self.load()
        self.model.requires_grad_(False)
        self.layers = linear_layers(self.model)
        self.whole = False
        """The weights of the base may have changed."""

    @property
    def vocabulary(self) -> int:
        """The number of tokens that the model knows."""
        return len(self.model.get_input_embeddings().weight)

    def add(self, name: str, lora: Lora | None) -> None:
        """Make a model. Raises RequestError where it cannot be."""
        if lora is None and self.tenants:
            raise RequestError("lora_config is missing: all weights can be trained by a single model, and there is one")
        if any(tenant.adapter is None for tenant in self.tenants.values()):
            raise RequestError("a model with all weights is there: it has to go before there can be another one")
        if self.whole or lora is None:  # other weights, or layers in which adapters have been
            self._begin()
        if lora is None:
            self.model.requires_grad_(True)
            self.whole = True
            tied = set(getattr(self.model, "all_tied_weights_keys", None) or ())
            named = {key: parameter for key, parameter in self.model.named_parameters() if key not in tied}
            self.tenants[name] = Tenant(None, named)
            return
        import peft

        config = peft.LoraConfig(
            r=lora.rank,
            lora_alpha=ALPHA,
            target_modules=self._targets(lora),
            task_type="CAUSAL_LM",
            base_model_name_or_path=self.model.config._name_or_path,
        )
        self.made += 1
        adapter = f"m{self.made}"
        adapters.insert(self.model, adapter, config, lora.seed)
        self.tenants[name] = Tenant(adapter, adapters_of(self.model, adapter))

    def _targets(self, lora: Lora) -> list[str]:
        """Return the last parts of the names of the layers that get an adapter."""
        ends = {True: set[str](), False: set[str]()}
        for layer in self.layers:
            ends["attn" in layer or "attention" in layer].add(layer.rpartition(".")[2])
        targets = (ends[True] if lora.train_attn else set()) | (ends[False] if lora.train_mlp else set())
        if not targets:
            raise RequestError(
                "lora_config: no layers are left: set train_attn or train_mlp (the output head has no adapter here)"
            )
        return sorted(targets)

    def remove(self, name: str) -> None:
        """Forget a model."""
        tenant = self.tenants.pop(name)
        if tenant.adapter is not None:
            adapters.remove(self.model, tenant.adapter)

    def forward(self, name: str, request: Forward) -> dict[str, Any]:
        """Run a pass. Its gradient is added to the model's, all of it or none. Returns logprobs and metrics.

        Raises RequestError for a gradient that is not finite.
        """
        _, function = losses.loss_of(request.loss_fn, request.config)
        tenant = self._use(name)
        logprobs: list[Any] = [None] * len(request.data)
        totals: Metrics = {}
        with contextlib.ExitStack() as opened:
            opened.enter_context(torch.no_grad() if request.forward_only else self._adding(tenant))
            for places in self._batches(request.data):
                some = [request.data[place] for place in places]
                loss, values = self._run(some, function, totals)
                if not request.forward_only:
                    loss.backward()
                for place, own in zip(places, values, strict=True):
                    logprobs[place] = own
        return {
            "type": "forward",
            "logprobs": [values.tobytes() for values in logprobs],
            "shapes": [list(values.shape) for values in logprobs],
            "metrics": _named(totals),
        }

    def _use(self, name: str) -> Tenant:
        """Have the base run with the adapter of a model."""
        tenant = self.tenants[name]
        if tenant.adapter is not None:
            adapters.use(self.model, tenant.adapter)
        return tenant

    @contextlib.contextmanager
    def _adding(self, tenant: Tenant) -> Iterator[None]:
        """Add the gradient that the block makes to what was there; where the block raises, nothing is added."""
        parameters = tenant.parameters.values()
        before = [parameter.grad for parameter in parameters]
        tenant.optimizer.zero_grad(set_to_none=True)
        try:
            yield
            norm = gradient_norm(parameters, None)
            if not math.isfinite(norm):
                raise RequestError(f"the norm of this gradient is {norm}: it was dropped; look at logprobs, advantages")
        except BaseException:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
            raise
        for parameter, gradient in zip(parameters, before, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)

    def _batches(self, data: list[Datum]) -> Iterator[list[int]]:
        """Yield the places of data that go through the model together: the longest first, one at least."""
        order = sorted(range(len(data)), key=lambda place: len(data[place].tokens), reverse=True)
        while order:
            count = max(1, self.tokens_per_forward // len(data[order[0]].tokens))
            yield order[:count]
            order = order[count:]

    def _run(self, data: list[Datum], function: LossFunction, totals: Metrics) -> tuple[Tensor, list[np.ndarray]]:
        """Compute the loss of some data, and the logprobs of each one's targets; metrics are added to `totals`."""
        device = next(self.model.parameters()).device
        stack = stack_of(data, device)
        logprobs, _, _ = run_stack(self.model, stack, head_chunk=None)
        names = data[0].inputs.keys() - {"target_tokens"}  # those of all, as was checked
        streams = {name: torch.from_numpy(_flat(data, name).astype(np.float32)).to(device) for name in names}
        loss, metrics = losses.compute(function, logprobs, streams, stack.sequence_lengths)
        add_metric(totals, "loss:sum", loss.detach(), 1)
        for key, pair in metrics.items():
            add_metric(totals, key, *pair)
        values = logprobs.detach().float().cpu().split(stack.sequence_lengths)
        shapes = [datum.inputs["target_tokens"].shape for datum in data]
        return loss, [own.numpy().reshape(shape) for own, shape in zip(values, shapes, strict=True)]

    def optim_step(self, name: str, adam: Adam) -> dict[str, Any]:
        """Update a model by its gradient, which is gone then, also where it is not finite.

        Raises RequestError, with the weights as they were, for such a gradient.
        """
        tenant = self.tenants[name]
        parameters = list(tenant.parameters.values())
        norm = gradient_norm(parameters, None)
        try:
            if not math.isfinite(norm):
                raise RequestError(
                    f"the norm of the gradient is {norm}: weights are as they were, the gradient is gone"
                )
            scale = adam.grad_clip_norm / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_ has it
            if 0 < scale < 1:
                scale_gradients(parameters, scale)
            tenant.optimizer.param_groups[0].update(
                lr=adam.learning_rate,
                betas=(adam.beta1, adam.beta2),
                eps=adam.eps,
                weight_decay=adam.weight_decay,
            )
            tenant.optimizer.step()
        finally:
            tenant.optimizer.zero_grad(set_to_none=True)
        tenant.step += 1
        return {"metrics": {"unclipped_grad_l2:mean": norm, "step:max": float(tenant.step)}}

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Copy all that a model is: weights, optimiser and gradient, by `<what>/<name in files>`."""
        tenant = self.tenants[name]
        tensors: dict[str, Tensor] = {}
        for key, parameter in tenant.parameters.items():
            parts = {"weight": parameter, **tenant.optimizer.state.get(parameter, {})}
            if parameter.grad is not None:
                parts["gradient"] = parameter.grad
            tensors |= {f"{part}/{key}": tensor.detach().to("cpu", copy=True) for part, tensor in parts.items()}
        return tensors

    @torch.no_grad()
    def put(self, name: str, tensors: dict[str, Tensor], step: int, *, optimizer: bool = True) -> None:
        """Give a model what `tensors` copied; without its optimiser this one begins anew.

        Raises RequestError, with the model as it was, for tensors of another model.
        """
        tenant = self.tenants[name]
        for key, parameter in tenant.parameters.items():
            saved = tensors.get(f"weight/{key}")
            if saved is None or saved.shape != parameter.shape:
                shape = "none" if saved is None else list(saved.shape)
                raise RequestError(f"path: {key} has shape {shape} there and {list(parameter.shape)} in this model")
        tenant.optimizer.state.clear()
        tenant.step = step if optimizer else 0
        for key, parameter in tenant.parameters.items():
            parameter.copy_(tensors[f"weight/{key}"])
            gradient = tensors.get(f"gradient/{key}")
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
            for part in ("step", "exp_avg", "exp_avg_sq") if optimizer else ():
                if f"{part}/{key}" in tensors:
                    value = tensors[f"{part}/{key}"]
                    # As torch has them: the count of steps stays on the CPU.
                    tenant.optimizer.state[parameter][part] = value if part == "step" else value.to(parameter.device)


def stack_of(data: list[Datum], device: torch.device) -> Stack:
    """Make the tensors of data that go through the model together: a row each, and the targets of all.

    Position i of a row predicts the targets of position i, whatever they are, several in one position too.
    """
    width = max(len(datum.tokens) for datum in data)
    input_ids = torch.zeros(len(data), width, dtype=torch.int64)
    before: list[Tensor] = []
    for row, datum in enumerate(data):
        input_ids[row, : len(datum.tokens)] = torch.tensor(datum.tokens)
        several = datum.inputs["target_tokens"].size // len(datum.tokens)
        before.append(row * width + torch.arange(len(datum.tokens)).repeat_interleave(several))
    targets = torch.from_numpy(_flat(data, "target_tokens").astype(np.int64)).to(device)
    every = torch.ones_like(targets, dtype=torch.bool)
    count = len(data)
    return Stack(
        input_ids=input_ids.to(device),
        position_ids=torch.arange(width, device=device).expand(len(data), width),
        token_ids=targets,
        before=torch.cat(before).to(device),
        temperatures=torch.ones(len(targets), device=device),
        wanted=every,
        mask=every,
        logprobs=torch.zeros(len(targets), device=device),
        streams={},
        sequence_lengths=[datum.inputs["target_tokens"].size for datum in data],
        references=[Reference()] * count,
        losses=[""] * count,
        envs=[""] * count,
        origins=[(row, 0) for row in range(count)],
    )


def _flat(data: list[Datum], name: str) -> np.ndarray:
    """Return an input of all data, one after the other."""
    return np.concatenate([datum.inputs[name].reshape(-1) for datum in data])


def _named(totals: Metrics) -> dict[str, float]:
    """Return metrics by the names of the protocol, which end in how the SDK combines those of several calls."""
    named = {}
    for key, (total, count) in totals.items():
        if key == "loss:sum":
            named[key] = float(total)
        elif float(count):
            largest = key.endswith("/max")
            named[f"{key.removesuffix('/max')}:{'max' if largest else 'mean'}"] = float(total) / float(count)
    return named
