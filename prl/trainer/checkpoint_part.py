"""The trainer's part of a checkpoint: weights, optimiser and random generators.

state/trainer.safetensors     every tensor: optimizer/…, reference/<name>/…, generator/<rank>/{cpu,cuda}
state/trainer.json            everything else of the optimiser, with the tensors' names in their places
adapter/                      with model.lora, the adapters as peft has them; the weights have them merged

Tensors and JSON alone: nothing in a checkpoint is code. The optimiser's state is kept by parameter name, and its
settings are not kept: they are the config's, which may have changed when a run goes on.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from prl.base.checkpoint_folders import STATE, checkpoint_path, part_path
from prl.base.errors import UNREADABLE, ConfigError, PrlError
from prl.base.files import naming, write_tensors, writing
from prl.trainer.lora import ADAPTER, adapters_of, write_adapters
from prl.trainer.model import write_model
from prl.trainer.optim import Optimizers
from prl.trainer.references import moving
from prl.trainer.sharding import part_like, whole
from prl.trainer.trainer import Trainer
from prl.trainer.weights import on_writer, whole_tensors

TENSOR = "$tensor"
"""Key, in `trainer.json`, of the name of a tensor that stands in `trainer.safetensors`."""


@dataclass(frozen=True)
class Part:
    """The trainer's part of a checkpoint, copied to host memory: the trainer may go on while it is written.

    Tensors are whole, whatever ranks they were spread over; ranks other than the first have none.
    """

    weights: dict[str, torch.Tensor]
    """Tensors of the model by their names in its files, float32; adapters are merged."""
    adapters: dict[str, torch.Tensor]
    state: str
    """Content of `trainer.json`."""
    tensors: dict[str, torch.Tensor]
    """Content of `trainer.safetensors`."""


def take_part(trainer: Trainer, *, rank: int = 0) -> Part:
    """Copy the state of the trainer, for a checkpoint. A collective; rank 0 gets the tensors.

    Raises PrlError where the optimiser's state holds what is no plain data.
    """
    copied = functools.partial(on_writer, writes=rank == 0, copies=True)
    named, tensors = _state(trainer)
    controls = {name: (control.coef, control.below) for name, control in trainer.entropy_controls.items()}
    try:
        state = json.dumps({"optimizer": named, "entropy": controls})
    except TypeError as error:
        owners = " or ".join(type(optimizer).__name__ for optimizer in trainer.optimizer.optimizers)
        raise PrlError(f"the state of {owners} has what a checkpoint cannot hold: {error}") from error
    return Part(
        copied(whole_tensors(trainer.model, torch.float32)),
        copied(_gathered(adapters_of(trainer.model))),
        state,
        copied(_gathered(tensors | _generators(trainer.device))),
    )


def write_part(run_dir: Path, step: int, part: Part, model: PreTrainedModel, files: Mapping[str, bytes]) -> None:
    """Write the trainer's part of the checkpoint of `step`, whole or not at all.

    Args:
        run_dir: the run directory.
        step: the last step that the weights were trained in, 0 for the base model.
        part: the part of rank 0, which alone has tensors.
        model: the policy, whose configs go with the weights.
        files: what its folder has beside weights and configs, by path: `companion_files` and `tokenizer_files`.

    Raises:
        PrlError: it cannot be written, as on a full disk, and nothing is left of it; or a weight is not finite: nobody
            could go on from there.
    """
    for name, weight in part.weights.items():
        # NaN is the least and the largest: a tenth of the time of looking at each number.
        if weight.numel() and not torch.stack(weight.aminmax()).isfinite().all():
            raise PrlError(
                f"step {step}: weights are not finite ({name}), and no checkpoint of them is written: go on from one "
                "before it, with a lower trainer.optim.lr"
            )
    with naming(checkpoint_path(run_dir, step)), writing(part_path(run_dir, step)) as folder:
        write_model(folder, model, part.weights, files)
        if part.adapters:
            write_adapters(folder / ADAPTER, model, part.adapters)
        (folder / STATE).mkdir()
        (folder / STATE / "trainer.json").write_text(part.state, encoding="utf-8")
        write_tensors(part.tensors, folder / STATE / "trainer.safetensors")


def load_state(folder: Path, trainer: Trainer, *, rank: int = 0) -> None:
    """Put optimiser and random generators back as `take_part` found them; the weights are loaded already.

    A rank that the checkpoint does not know keeps its generators. Raises ConfigError where the optimiser's state does
    not fit the model's parameters.
    """
    saved = _read_state(folder)
    parameters = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    missing = sorted(saved["optimizer"].keys() - parameters.keys())
    if missing:
        raise ConfigError(f"{folder}: the optimiser's state is of parameters that the model lacks: {missing[0]}")
    for name, control in trainer.entropy_controls.items():
        # A loss that has got an `entropy_target` since begins with its config.
        control.coef, control.below = saved.get("entropy", {}).get(name, (control.coef, control.below))
    with _tensors_of(folder / STATE / "trainer.safetensors") as tensors:
        _load_optimizer(trainer.optimizer, parameters, saved["optimizer"], tensors.get_tensor)
        saved_names = set(tensors.keys())
        _load_references(trainer, saved_names, tensors.get_tensor)
        own = {kind: f"generator/{rank}/{kind}" for kind in ("cpu", "cuda")}
        generators = {kind: tensors.get_tensor(name) for kind, name in own.items() if name in saved_names}
    if "cpu" in generators:
        torch.set_rng_state(generators["cpu"])
    if "cuda" in generators and trainer.device.type == "cuda":
        torch.cuda.set_rng_state(generators["cuda"], trainer.device)


@contextlib.contextmanager
def _tensors_of(path: Path) -> Iterator[Any]:
    """Open a file of tensors. Raises ConfigError, naming it, where it cannot be read or lacks a tensor."""
    try:
        with safe_open(path, "pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise ConfigError(f"{path} is damaged, the trainer's state cannot be read: {error}") from error


@torch.no_grad()
def _load_references(trainer: Trainer, saved: Collection[str], tensor: Callable[[str], torch.Tensor]) -> None:
    """Put the references that move back. Raises ConfigError for one that the checkpoint does not have."""
    for name, weight in moving(trainer.references):
        if name not in saved:
            raise ConfigError(
                f"the checkpoint has no reference {name.split('/')[1]}: go on with the reference, decay and every that "
                "the run had, or begin a new run"
            )
        weight.copy_(part_like(weight, tensor(name)))


def _load_optimizer(
    optimizers: Optimizers,
    parameters: Mapping[str, torch.nn.Parameter],
    saved: Mapping[str, Any],
    tensor: Callable[[str], torch.Tensor],
) -> None:
    """Give the optimisers of `parameters` the state that is saved by their names; settings stay as they are."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    for optimizer in optimizers.optimizers:
        # Optimisers number their parameters: group by group, in the order in which they got them.
        order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
        state = {
            number: _with_tensors(saved[name], _parts(parameters[name], tensor))
            for number, name in enumerate(order)
            if name in saved
        }
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _parts(parameter: torch.nn.Parameter, tensor: Callable[[str], torch.Tensor]) -> Callable[[str], torch.Tensor]:
    """Return a function like `tensor` for what belongs to `parameter`: this rank's part where that is one."""
    return lambda name: part_like(parameter, tensor(name))


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / STATE / "trainer.json"
    try:
        saved: dict[str, Any] = json.loads(path.read_bytes())
    except UNREADABLE as error:
        raise ConfigError(f"{path} is damaged, the trainer's state cannot be read: {error}") from error
    return saved


def _state(trainer: Trainer) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The optimiser's state by parameter, for JSON, and all tensors by their names, of which ranks have parts."""
    tensors = dict(moving(trainer.references))
    state = trainer.optimizer.state
    parameters = trainer.model.named_parameters()  # in the same order on all ranks
    named = {name: _without_tensors(state[p], f"optimizer/{name}", tensors) for name, p in parameters if p in state}
    return named, tensors


def _gathered(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather tensors that are spread over ranks, one after the other. A collective."""
    for name, tensor in tensors.items():
        yield name, whole(tensor.detach())


def _without_tensors(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return `value` for JSON: its tensors go into `tensors`, under names below `name` that stand in their places."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return {TENSOR: name}
    if isinstance(value, Mapping):
        return {str(key): _without_tensors(item, f"{name}/{key}", tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_tensors(item, f"{name}/{place}", tensors) for place, item in enumerate(value)]
    return value


def _with_tensors(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """The inverse of `_without_tensors`, but for tuples, which come back as lists."""
    if isinstance(value, dict):
        if value.keys() == {TENSOR}:
            return tensor(value[TENSOR])
        return {key: _with_tensors(item, tensor) for key, item in value.items()}
    return [_with_tensors(item, tensor) for item in value] if isinstance(value, list) else value


def _generators(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of torch's random generators of every rank, by `generator/<rank>/<cpu or cuda>`; a collective."""
    own = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        own["cuda"] = torch.cuda.get_rng_state(device)
    if not dist.is_initialized():
        return {f"generator/0/{name}": state for name, state in own.items()}
    generators: dict[str, torch.Tensor] = {}
    for name, state in own.items():
        # A GPU's collectives take no tensors in host memory.
        state = state.to(device)
        states = [torch.empty_like(state) for _ in range(dist.get_world_size())]
        dist.all_gather(states, state)
        generators |= {f"generator/{rank}/{name}": state.cpu() for rank, state in enumerate(states)}
    return generators
