"""The trainer's part of a checkpoint: weights, optimiser, schedule and random generators.

state/trainer.safetensors     every tensor: optimiser/…, generator/<rank>/{cpu,cuda}
state/trainer.json            everything else of the optimiser, with the tensors' names in their places; the schedule
adapter/                      with model.lora, the adapters as peft has them; the weights have them merged

Tensors and JSON alone: nothing in a checkpoint is code. The optimiser's state is kept by parameter name, and its
settings are not kept: they are the config's, which may have changed when a run goes on.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from prl.config.model_folder import write_files
from prl.errors import UNREADABLE, ConfigError, PrlError
from prl.text import in_one_line
from prl.trainer.lora import ADAPTER, has_adapters, save_adapters, trained_shapes
from prl.trainer.model import save_weights
from prl.trainer.sharding import part_like, whole
from prl.trainer.tensor_file import send_all, write_tensors
from prl.trainer.trainer import Trainer, make_optimizer
from prl.wire.checkpoints import STATE, checkpoint_path, part_path, writing
from prl.wire.files import naming

TENSOR = "$tensor"
"""Key of what stands for a tensor in `trainer.json`."""


def write_part(run_dir: Path, step: int, trainer: Trainer, tokenizer: Mapping[str, bytes], *, rank: int = 0) -> None:
    """Write the trainer's part of the checkpoint of `step`, whole or not at all. Every rank calls it; rank 0 writes.

    What is spread over ranks comes to rank 0 tensor by tensor, so the files do not tell how many ranks there were.

    Args:
        run_dir: the run directory.
        step: the last step that the weights were trained in, 0 for the base model.
        trainer: has the model, float32, and what else belongs to it.
        tokenizer: the files of the tokenizer, as `tokenizer_files` has them; of rank 0.
        rank: this process's.

    Raises:
        OSError: it cannot be written, as on a full disk; nothing is left of it.
    """
    generators = _generators(trainer.device)
    if rank:
        save_weights(trainer.model, None, torch.float32)
        save_adapters(trainer.model, None)
        return send_all(_gathered(_optimizer_state(trainer)[1]))
    with naming(checkpoint_path(run_dir, step)), writing(part_path(run_dir, step)) as folder:
        save_weights(trainer.model, folder, torch.float32)
        if has_adapters(trainer.model):
            save_adapters(trainer.model, folder / ADAPTER)
        write_files(tokenizer, folder)
        _write_state(folder / STATE, trainer, generators)


def load_state(folder: Path, trainer: Trainer, *, rank: int = 0) -> None:
    """Put optimiser, schedule and random generators back as `write_part` found them; the weights are loaded already.

    A rank that the checkpoint does not know keeps its generators. Raises ConfigError where the optimiser's state does
    not fit the model's parameters.
    """
    saved = _read_state(folder)
    parameters = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    if missing := sorted(set(saved["optimizer"]) - set(parameters)):
        raise ConfigError(f"{folder}: the optimiser's state is of parameters that the model lacks: {missing[0]}")
    with safe_open(folder / STATE / "trainer.safetensors", "pt") as tensors:
        _load_optimizer(trainer.optimizer, parameters, saved["optimizer"], tensors.get_tensor)
        own = {f"generator/{rank}/{kind}" for kind in ("cpu", "cuda")}
        generators = {name: tensors.get_tensor(name) for name in own.intersection(tensors.keys())}
    if (schedule := saved.get("schedule")) is not None and hasattr(trainer.schedule, "load_state_dict"):
        trainer.schedule.load_state_dict(schedule)
    if (cpu := generators.get(f"generator/{rank}/cpu")) is not None:
        torch.set_rng_state(cpu)
    if (cuda := generators.get(f"generator/{rank}/cuda")) is not None and trainer.device.type == "cuda":
        torch.cuda.set_rng_state(cuda, trainer.device)


def check_settings(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ConfigError for a changed setting with which the optimiser cannot go on from its state in a checkpoint.

    Tried out: on the smallest parameter of each number of dimensions, it takes a step from the state that it has there.
    Nothing is said of an optimiser that cannot do so with the settings of before, as on a machine that is not its own.

    Args:
        folder: the checkpoint.
        before: the node `trainer.optim` that the run had.
        now: the one that it goes on with.
    """
    if _failure(folder, before) is not None or (error := _failure(folder, now)) is None:
        return
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    for name in changed:
        alone = {key: value for key, value in {**before, name: now.get(name)}.items() if key != name or name in now}
        if _failure(folder, alone) is not None:
            changed = [name]
            break
    values = [(name, before.get(name, "not set"), now.get(name, "not set")) for name in changed]
    said = ", ".join(f"trainer.optim.{name} was {was} and is {is_now}" for name, was, is_now in values)
    raise ConfigError(
        f"{said}: with that the optimiser cannot go on from its state in {folder} ({type(error).__name__}: "
        f"{in_one_line(error)}): leave it as it was, or begin a new run from the weights, model.path={folder}"
    )


def _failure(folder: Path, node: Mapping[str, Any]) -> Exception | None:
    """What the optimiser of `node` raises where it takes a step from the checkpoint's state; None = nothing."""
    saved = _read_state(folder)["optimizer"]
    trained = trained_shapes(folder)
    shapes = {name: trained[name] for name in saved or trained if name in trained}  # experts have others in files
    smallest = {len(shape): (name, shape) for name, shape in sorted(shapes.items(), key=lambda kv: -math.prod(kv[1]))}
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in smallest.values()}
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer = make_optimizer(torch.nn.ParameterList(parameters.values()), node)
        with safe_open(folder / STATE / "trainer.safetensors", "pt") as tensors:
            _load_optimizer(optimizer, parameters, saved, tensors.get_tensor)
        optimizer.step()
    except Exception as error:  # whatever a class does with a state that is not its own
        return error
    return None


def _load_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    saved: Mapping[str, Any],
    tensor: Callable[[str], torch.Tensor],
) -> None:
    """Give the optimiser of `parameters` the state that is saved by their names; its settings stay as they are."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        number: _with_tensors(saved[name], _parts(parameters[name], tensor))
        for number, name in enumerate(order)
        if name in saved
    }
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _parts(parameter: torch.nn.Parameter, tensor: Callable[[str], torch.Tensor]) -> Callable[[str], torch.Tensor]:
    """Like `tensor`, of what belongs to `parameter`: this rank's part where that is one."""
    return lambda name: part_like(parameter, tensor(name))


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / STATE / "trainer.json"
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
    except UNREADABLE as error:
        raise ConfigError(f"{path} is damaged, the trainer's state cannot be read: {error}") from error
    return found


def _write_state(folder: Path, trainer: Trainer, generators: Mapping[str, torch.Tensor]) -> None:
    folder.mkdir()
    state, tensors = _optimizer_state(trainer)
    tensors |= generators
    schedule = trainer.schedule.state_dict() if hasattr(trainer.schedule, "state_dict") else None
    try:
        text = json.dumps({"optimizer": state, "schedule": schedule})
    except TypeError as error:
        owners = f"{type(trainer.optimizer).__name__} or {type(trainer.schedule).__name__}"
        raise PrlError(f"the state of {owners} holds what a checkpoint cannot: {error}") from error
    (folder / "trainer.json").write_text(text, encoding="utf-8")
    write_tensors(folder / "trainer.safetensors", tensors, _gathered(tensors))


def _optimizer_state(trainer: Trainer) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The optimiser's state by parameter, for JSON, and its tensors by their names there, of which ranks have parts."""
    tensors: dict[str, torch.Tensor] = {}
    state = trainer.optimizer.state
    parameters = trainer.model.named_parameters()  # in the same order on all ranks
    named = {name: _without_tensors(state[p], f"optimizer/{name}", tensors) for name, p in parameters if p in state}
    return named, tensors


def _gathered(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each whole, one after the other; a collective."""
    for name, tensor in tensors.items():
        yield name, whole(tensor.detach())


def _without_tensors(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """`value` for JSON: its tensors go into `tensors`, by names that begin with `name` and stand in their places."""
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
    found: dict[str, torch.Tensor] = {}
    for name, state in own.items():
        state = state.to(device)
        states = [torch.empty_like(state) for _ in range(dist.get_world_size())]
        dist.all_gather(states, state)
        found |= {f"generator/{rank}/{name}": each.cpu() for rank, each in enumerate(states)}
    return found
