"""Parameters over ranks, by FSDP2: each rank keeps a part of every parameter, of its gradient and of what the optimiser
has of it. A layer is whole only while it runs.

A rank's part is a slice of the first dimension, in its own `DTensor`. Ranks in one row of the mesh (`shard`) have one
copy between them, ranks in one column (`replicate`) have the same part. Gradients are summed, not averaged, since the
loss is already divided by counts of all ranks. Forward and backward are collectives, so all ranks must make as many.
"""

import functools
import math
import types
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, TypeGuard, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from prl.config.trainer import Precision

P = ParamSpec("P")
R = TypeVar("R")
PIECE = 1 << 15
"""Numbers of a gradient on a CPU whose squares are summed in float32: their norm is then right to 1e-7, in no more
time than in larger pieces with less of it. In float64 throughout it takes half as long again."""


def make_mesh(device: torch.device, shard_size: int | None) -> DeviceMesh:
    """Arrange the ranks as a mesh: `[shard]` where all of them share one copy, else `[replicate, shard]`.

    Raises ValueError where `shard_size` does not divide the ranks.
    """
    ranks = dist.get_world_size()
    size = ranks if shard_size is None else shard_size
    if ranks % size:
        raise ValueError(f"trainer.shard_size={size} does not divide {ranks} ranks")
    if size == ranks:
        return init_device_mesh(device.type, (ranks,), mesh_dim_names=("shard",))
    mesh = init_device_mesh(device.type, (ranks // size, size), mesh_dim_names=("replicate", "shard"))
    for group in mesh.get_all_groups():  # which have torch's own deadline, NCCL's of ten minutes
        _set_pg_timeout(timeout_of(dist.group.WORLD, device), group)
    return mesh


def timeout_of(group: Any, device: torch.device) -> timedelta:
    """Return the time that a rank waits for the others in a collective of `group`, which torch 2.13 keeps to itself."""
    return cast(timedelta, group._get_backend(torch.device(device.type)).options._timeout)


def is_part(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor is one rank's part of a larger one."""
    return isinstance(tensor, DTensor)


def is_shared(model: object) -> TypeGuard[fsdp.FSDPModule]:
    """Return whether ranks share a model."""
    return isinstance(model, fsdp.FSDPModule)


def layers_of(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the layers of a model, which it names as what must stay in one piece; [] where it names none."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def shard(
    model: PreTrainedModel, mesh: DeviceMesh, device: torch.device, *, precision: Precision, offload: bool
) -> None:
    """Spread a model over the ranks: each keeps its part. A collective.

    Args:
        model: the model, its weights on rank 0; those of other ranks are not read, and may be on the meta device.
        mesh: the ranks, as `make_mesh` has them.
        device: where the model runs.
        precision: number format of forward and backward; weights, sums of gradients and optimiser stay in float32.
        offload: keep the parts in host memory.
    """
    how: dict[str, Any] = {"mesh": mesh, "offload_policy": fsdp.OffloadPolicy()}
    if not any(parameter.requires_grad for parameter in model.parameters()):
        how["reshard_after_forward"] = True  # else what is outside of the layers would wait for a backward
    # Inputs as they come: a cast would round temperatures too.
    how["mp_policy"] = fsdp.MixedPrecisionPolicy(cast_forward_inputs=False)
    if precision.is_mixed:
        dtype = getattr(torch, precision.dtype)
        how["mp_policy"] = fsdp.MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    if offload:
        how["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for module in (*layers_of(model), model):  # one at a time, so that no rank but the first holds all of it whole
        _receive(module.parameters(), device)
        _receive(module.buffers(), device)
        sharded = fsdp.fully_shard(module, **how)
        sharded.set_gradient_divide_factor(1.0)  # of this module alone, as the next
        sharded.set_force_sum_reduction_for_comms(True)  # else gloo does not know of such a factor
        sharded.set_reduce_scatter_unused_params(True)  # unused on this rank, maybe not on another


@torch.no_grad()
def _receive(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Give each tensor that is not sharded yet rank 0's values, on `device`; it stays the same object, tied or not."""
    for tensor in tensors:
        if is_part(tensor):
            continue
        values = tensor.detach()
        if values.device.type != device.type:
            values = torch.empty_like(values, device=device) if values.is_meta else values.to(device)
        dist.broadcast(values, 0)
        if tensor.device != values.device:
            values = values.detach()  # one that nothing else refers to
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            new = torch.nn.Parameter(values, tensor.requires_grad) if is_parameter else values
            torch.utils.swap_tensors(tensor, new)


def as_forward(
    function: Callable[Concatenate[PreTrainedModel, P], R],
) -> Callable[Concatenate[PreTrainedModel, P], R]:
    """Make a function of a model find the parameters whole, those outside of its layers too, where it is sharded."""

    @functools.wraps(function)
    def call(model: PreTrainedModel, *args: P.args, **kwargs: P.kwargs) -> R:
        # FSDP gathers what is outside of the layers in the methods that it knows of, so the function becomes one.
        if not is_shared(model):
            return function(model, *args, **kwargs)
        name = function.__name__
        if name not in vars(model):
            vars(model)[name] = types.MethodType(function, model)
            fsdp.register_fsdp_forward_method(cast(torch.nn.Module, model), name)
        return cast(R, getattr(model, name)(*args, **kwargs))

    return call


def reduce_over_replicas(model: PreTrainedModel, wanted: bool) -> None:
    """Set whether the next backward sums gradients over the copies of the model as well as over the ranks of one.

    The sum over the ranks of one copy could wait for the last backward too, but a rank would hold the whole gradient
    until then.
    """
    if is_shared(model):
        model.set_requires_all_reduce(wanted)


def most(numbers: list[int], device: torch.device) -> list[int]:
    """Return the largest of each number over the ranks, all of which give as many numbers. A collective."""
    if not dist.is_initialized():
        return numbers
    reduced = torch.tensor(numbers, device=device)
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
    return cast(list[int], reduced.tolist())


@torch.no_grad()
def gradient_norm(parameters: Iterable[torch.nn.Parameter], mesh: DeviceMesh | None) -> float:
    """Compute the 2-norm of all gradients of a model, the same on every rank. A collective of one number.

    The squares of few numbers at a time are summed in float32, and these sums in float64; on a GPU all in float64. In
    float32 throughout, a large matrix is off by its third digit, and by another amount where ranks hold parts of it.

    Args:
        parameters: the parameters; those without a gradient are passed over.
        mesh: the mesh that the model is spread over, whose copies have the same gradient; None where it is whole.
    """
    pieces: list[torch.Tensor] = []
    for gradient in gradients_of(parameters):
        few = gradient.device.type != "cpu" or gradient.numel() <= PIECE
        pieces += [gradient] if few else gradient.reshape(-1).split(PIECE)
    if not pieces:
        return 0.0
    dtype = None if pieces[0].device.type == "cpu" else torch.float64
    total = torch.stack(torch._foreach_norm(pieces, 2, dtype)).double().square().sum()
    if mesh is not None:
        # Over the ranks that share a copy: another copy has the same gradient already.
        dist.all_reduce(total, group=mesh.get_group("shard"))
    return math.sqrt(total.item())


@torch.no_grad()
def scale_gradients(parameters: Iterable[torch.nn.Parameter], factor: float) -> None:
    """Multiply all gradients by a factor, in place."""
    torch._foreach_mul_(gradients_of(parameters), factor)


def gradients_of(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Return this rank's parts of the gradients, of parameters that have one."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [gradient.to_local() if is_part(gradient) else gradient for gradient in gradients]


def reshard(model: PreTrainedModel) -> None:
    """Free the whole parameters that a forward without a backward has left on each rank."""
    if is_shared(model):
        model.reshard()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor, which may be spread over ranks. A collective."""
    return tensor.full_tensor() if is_part(tensor) else tensor


def part_like(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Cut this rank's part out of `tensor`, which all ranks have whole, where it is shaped as a sharded parameter."""
    if not is_part(parameter) or is_part(tensor) or tensor.shape != parameter.shape:
        return tensor
    part = distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return part.to(parameter.to_local().device)  # it was made where the mesh is: a GPU, of weights in host memory too
