"""The models that clients train: adapters beside one base, each with its own optimiser, gradient and step.

A model of a client without an adapter is the base itself with all of its weights; then it is the only one.

Over several ranks the base is spread as a run's model is, and so are all weights of such a model. Adapters, which come
and go, are whole on each rank; their gradients are summed. Every method of `COLLECTIVE` is called on all ranks alike.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from prl.config.trainer import RanksConfig, precision_of
from prl.losses.interface import Metrics, add_metric
from prl.rollouts.messages import TrainingSample, sequence_slices
from prl.rollouts.packing import pack
from prl.tinker import adapters, losses
from prl.tinker.wire import Adam, Datum, Forward, Lora, RequestError
from prl.trainer import sharding
from prl.trainer.batch import Stack, empty_stack
from prl.trainer.layers import recompute_activations
from prl.trainer.lora import adapters_of, linear_layers
from prl.trainer.metrics import gather
from prl.trainer.model import check_layout, run_stack
from prl.trainer.tree.tree import layout_of
from prl.trainer.weights import on_writer, whole_tensors

ALPHA = 32
"""Scale of an adapter, W + ALPHA / rank * B A, that of the hosted service."""
COLLECTIVE: dict[str, Any] = {
    "add": tuple[str, Lora | None],
    "remove": tuple[str],
    "forward": tuple[str, Forward],
    "optim_step": tuple[str, Adam],
    "tensors": tuple[str],
    "weights": tuple[str, bool],
    "put": tuple[str, dict[str, Tensor], int, bool],
}
"""Methods that all ranks call together, with the types of their arguments."""


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
        load: loads the base on a device; on the meta device for a rank that gets its weights from another.
        trainer: how models are trained; its device is `cpu` or `cuda:<number>`.
        longest: tokens of the longest sequence.
        tell: called with the name and the arguments of each method of `COLLECTIVE` before it runs, so that other ranks
            can follow.

    Raises ValueError for a model that packing or shared tokens would get wrong.
    """

    def __init__(
        self,
        load: Callable[[torch.device], PreTrainedModel],
        trainer: RanksConfig,
        *,
        longest: int,
        tell: Callable[..., None] = lambda method, *arguments: None,
    ):
        self.load, self.trainer = load, trainer
        self.longest = longest
        self.tell = tell
        self.device = torch.device(trainer.device)
        self.precision = precision_of(trainer.dtype, self.device.type)
        self.mesh = sharding.make_mesh(self.device, trainer.shard_size) if dist.is_initialized() else None
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.tenants: dict[str, Tenant] = {}
        self.made = 0
        self._begin(whole=False)
        check_layout(self.model, self.layout, self.device, self.precision.tolerance, longest)
        sharding.reshard(self.model)

    def _begin(self, *, whole: bool) -> None:
        """Load the base, to train it as a whole or adapters beside it."""
        take(self.device)
        place = self.device
        if self.mesh is not None:
            place = torch.device("meta" if self.rank else "cpu")
        self.model: Any = self.load(place)
        self.model.requires_grad_(whole)
        self.vocabulary = len(self.model.get_input_embeddings().weight)
        """Tokens that the model knows."""
        self.layers = linear_layers(self.model)
        self.layout = layout_of(self.model, self.device, share=self.trainer.share_prefixes)
        self.whole = whole
        """The weights of the base may change."""
        recompute_activations(self.model, self.trainer.gradient_checkpointing)
        if self.mesh is not None:
            sharding.shard(self.model, self.mesh, self.device, precision=self.precision, offload=False)

    def add(self, name: str, lora: Lora | None) -> None:
        """Make a model. Raises RequestError where it cannot be."""
        self.tell("add", name, lora)
        if lora is None and self.tenants:
            raise RequestError("lora_config is missing: all weights can be trained by a single model, and there is one")
        if any(tenant.adapter is None for tenant in self.tenants.values()):
            raise RequestError("a model with all weights is there: it has to go before there can be another one")
        if self.whole or lora is None:  # other weights, or layers in which adapters have been
            self._begin(whole=lora is None)
        if lora is None:
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
        # A seed in any case: ranks draw the same, and so does a server that makes the model again.
        adapters.insert(self.model, adapter, config, lora.seed or 0)
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
        self.tell("remove", name)
        tenant = self.tenants.pop(name)
        if tenant.adapter is not None:
            adapters.remove(self.model, tenant.adapter)

    def forward(self, name: str, request: Forward) -> dict[str, Any]:
        """Run a pass. Its gradient is added to the model's, all of it or none. Returns logprobs and metrics.

        Raises RequestError for a gradient that is not finite.
        """
        self.tell("forward", name, request)
        loss, settings = losses.loss_of(request.loss_fn, request.config)
        tenant = self._use(name)
        own: dict[int, bytes] = {}
        faults: list[str] = []
        totals: Metrics = {}
        stacks = self._stacks(request.data)
        with contextlib.ExitStack() as opened:
            opened.enter_context(torch.no_grad() if request.forward_only else self._adding(tenant))
            for place, (stack, numbers) in enumerate(stacks, 1):
                some = [request.data[number] for number in numbers]
                sharding.reduce_over_replicas(self.model, place == len(stacks))
                logprobs, _, _ = run_stack(self.model, with_targets(stack, some), head_chunk=None)
                try:
                    total, metrics = loss.compute(settings, logprobs, some)
                except RequestError as error:  # of a traced loss: other ranks go on, and so does this one
                    faults.append(str(error))
                    total, metrics = losses.nothing(logprobs), {}
                if not request.forward_only:
                    total.backward()
                for key, pair in {"loss:sum": (total.detach(), 1), **metrics}.items():
                    add_metric(totals, key, *pair)
                sizes = [datum.inputs["target_tokens"].size for datum in some]
                values = logprobs.detach().float().cpu().split(sizes)
                own |= {number: part.numpy().tobytes() for number, part in zip(numbers, values, strict=True)}
            sharding.reshard(self.model)
            return self._result(request.data, own, totals, faults)

    def _use(self, name: str) -> Tenant:
        """Have the base run with the adapter of a model."""
        take(self.device)
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
            self._sum_over_ranks(tenant)
            norm = self._norm(tenant)
            if not math.isfinite(norm):
                raise RequestError(f"the norm of this gradient is {norm}: it was dropped; look at logprobs, advantages")
        except BaseException:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
            raise
        for parameter, gradient in zip(parameters, before, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)

    def _sum_over_ranks(self, tenant: Tenant) -> None:
        """Sum the gradient of an adapter over the ranks, in one collective: FSDP does not know of adapters."""
        if self.mesh is None or tenant.adapter is None:
            return
        for parameter in tenant.parameters.values():
            if parameter.grad is None:  # this rank had nothing to train
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in tenant.parameters.values() if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def _norm(self, tenant: Tenant) -> float:
        """Return the norm of a model's gradient, the same on every rank."""
        return sharding.gradient_norm(tenant.parameters.values(), self.mesh if tenant.adapter is None else None)

    def _stacks(self, data: list[Datum]) -> list[tuple[Stack, list[int]]]:
        """Pack data as a run does: the stacks of this rank, as many as others have, and the numbers of their data."""
        samples = [sample_of(datum, number) for number, datum in enumerate(data)]
        packed, _ = pack(samples, max(len(sample.token_ids) for sample in samples), self.ranks)
        stacks = list(self.layout(packed[self.rank], self.trainer.tokens_per_forward, self.device))
        (longest,) = sharding.most([len(stacks)], self.device)
        stacks += [empty_stack(self.device) for _ in range(longest - len(stacks))]
        return [(stack, [int(name) for name in stack.envs]) for stack in stacks]

    def _result(self, data: list[Datum], own: dict[int, bytes], totals: Metrics, faults: list[str]) -> dict[str, Any]:
        """Gather what the ranks have of a pass: logprobs of the targets, by the number of the datum, and metrics.

        Raises RequestError where one of them has met a fault.
        """
        logprobs: dict[int, bytes] = {}
        metrics: Metrics = {}
        plain = {key: (float(total), float(count)) for key, (total, count) in totals.items()}
        for part in gather({"logprobs": own, "metrics": plain, "faults": faults}, self.device):
            if part["faults"]:
                raise RequestError(part["faults"][0])
            logprobs |= part["logprobs"]
            for key, pair in part["metrics"].items():
                add_metric(metrics, key, *pair)
        return {
            "type": "forward",
            "logprobs": [logprobs[number] for number in range(len(data))],
            "shapes": [list(datum.inputs["target_tokens"].shape) for datum in data],
            "metrics": _named(metrics),
        }

    def optim_step(self, name: str, adam: Adam) -> dict[str, Any]:
        """Update a model by its gradient, which is gone then, also where it is not finite.

        Raises RequestError, with the weights as they were, for such a gradient.
        """
        self.tell("optim_step", name, adam)
        tenant = self.tenants[name]
        norm = self._norm(tenant)
        try:
            if not math.isfinite(norm):
                raise RequestError(
                    f"the norm of the gradient is {norm}: weights are as they were, the gradient is gone"
                )
            scale = adam.grad_clip_norm / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_ has it
            if 0 < scale < 1:
                sharding.scale_gradients(tenant.parameters.values(), scale)
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
        """Copy all that a model is: weights, optimiser and gradient, by `<what>/<name in files>`. Rank 0 gets it."""
        self.tell("tensors", name)
        tenant = self.tenants[name]
        named: list[tuple[str, Tensor]] = []
        for key, parameter in tenant.parameters.items():
            parts = {"weight": parameter, **tenant.optimizer.state.get(parameter, {})}
            if parameter.grad is not None:
                parts["gradient"] = parameter.grad
            named += [(f"{part}/{key}", tensor) for part, tensor in parts.items()]
        return self._gathered(named, copies=True)

    def weights(self, name: str, merged: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return what files have of a model: its adapter's matrices, and where asked for the whole model with them."""
        self.tell("weights", name, merged)
        tenant = self.tenants[name]
        matrices = {} if tenant.adapter is None else self._gathered(list(tenant.parameters.items()))
        if not merged:
            return matrices, {}
        return matrices, self._gathered(whole_tensors(self.model, torch.float32, tenant.adapter or ""))

    def _gathered(self, named: Any, *, copies: bool = False) -> dict[str, Tensor]:
        """Gather tensors one after the other, for rank 0 alone."""
        gathered = ((key, sharding.whole(tensor.detach())) for key, tensor in named)
        return on_writer(gathered, writes=self.rank == 0, copies=copies)

    @torch.no_grad()
    def put(self, name: str, tensors: dict[str, Tensor], step: int, optimizer: bool = True) -> None:
        """Give a model what `tensors` copied; without its optimiser this one begins anew.

        Raises RequestError, with the model as it was, for tensors of another model.
        """
        self.tell("put", name, tensors, step, optimizer)
        tenant = self.tenants[name]
        for key, parameter in tenant.parameters.items():
            saved = tensors.get(f"weight/{key}")
            if saved is None or saved.shape != parameter.shape:
                shape = "none" if saved is None else list(saved.shape)
                raise RequestError(f"path: {key} has shape {shape} there and {list(parameter.shape)} in this model")
        tenant.optimizer.state.clear()
        tenant.step = step if optimizer else 0
        for key, parameter in tenant.parameters.items():
            own = {
                part: sharding.part_like(parameter, tensors[f"{part}/{key}"].to(parameter.device))
                for part in ("weight", "gradient", "exp_avg", "exp_avg_sq")
                if f"{part}/{key}" in tensors
            }
            parameter.copy_(own.pop("weight"))
            parameter.grad = own.pop("gradient", None)
            if optimizer and own:
                # As torch has them: the count of steps stays on the CPU.
                tenant.optimizer.state[parameter] = own | {"step": tensors[f"step/{key}"]}


def take(device: torch.device) -> None:
    """Have this thread compute on a GPU, where the device is one: each thread has its own current device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def sample_of(datum: Datum, number: int) -> TrainingSample:
    """Return a datum as a run packs it. One token more is the wanted one: so all of the datum go through the model."""
    length = len(datum.tokens)
    return TrainingSample(
        token_ids=[*datum.tokens, 0],
        mask=[False] * (length + 1),
        logprobs=[0.0] * (length + 1),
        temperatures=[1.0] * (length + 1),
        env_name=str(number),  # a stack has it of each of its sequences
        reward=0.0,
        ce_weights=[0.0] * length + [1.0],
    )


def with_targets(stack: Stack, data: list[Datum]) -> Stack:
    """Have a stack ask for the targets of its data, in place of their tokens.

    Position i of a datum predicts its targets of position i, whatever they are, several in one position too.
    """
    if not data:
        return stack
    device, before = stack.token_ids.device, []
    for part, datum in zip(sequence_slices(stack.sequence_lengths), data, strict=True):
        several = datum.inputs["target_tokens"].size // len(datum.tokens)
        # Where the token after it has its logprob from, a token is.
        before.append(stack.before[part][1:].repeat_interleave(several))
    targets = torch.from_numpy(losses.flat(data, "target_tokens")).to(device)
    every = torch.ones_like(targets, dtype=torch.bool)
    return replace(
        stack,
        token_ids=targets,
        before=torch.cat(before),
        temperatures=torch.ones(len(targets), device=device),
        wanted=every,
        mask=every,
        logprobs=torch.zeros(len(targets), device=device),
        streams={},
        sequence_lengths=[datum.inputs["target_tokens"].size for datum in data],
    )


def _named(totals: Metrics) -> dict[str, float]:
    """Return metrics by the names of the protocol, which end in how the SDK combines those of several calls."""
    named = {}
    for key, (total, count) in totals.items():
        if key.endswith(":sum"):
            named[key] = float(total)
        elif float(count):
            largest = key.endswith("/max")
            name = key if ":" in key else f"{key.removesuffix('/max')}:{'max' if largest else 'mean'}"
            named[name] = float(total) / float(count)
    return named
