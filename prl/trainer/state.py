"""The trainer's part of a checkpoint: weights, optimiser, schedule and random generators.

state/trainer.safetensors     every tensor: optimiser/…, generator/<rank>/{cpu,cuda}
state/trainer.json            everything else of the optimiser, with the tensors' names in their places; the schedule

Tensors and JSON alone: nothing in a checkpoint is code. The optimiser's state is kept by parameter name, and its
settings are not kept: they are the config's, which may have changed when a run goes on.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from prl.config.model_folder import write_files
from prl.errors import UNREADABLE, ConfigError, PrlError
from prl.trainer.model import save_weights
from prl.trainer.trainer import Trainer
from prl.wire.checkpoints import STATE, checkpoint_path, part_path, writing
from prl.wire.files import naming

TENSOR = "$tensor"
"""Key of what stands for a tensor in `trainer.json`."""


def write_part(run_dir: Path, step: int, trainer: Trainer, tokenizer: Mapping[str, bytes], *, rank: int = 0) -> None:
    """Write the trainer's part of the checkpoint of `step`, whole or not at all. Every rank calls it; rank 0 writes.

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
        return
    with naming(checkpoint_path(run_dir, step)), writing(part_path(run_dir, step)) as folder:
        save_weights(trainer.model, folder, torch.float32)
        write_files(tokenizer, folder)
        _write_state(folder / STATE, trainer, generators)


def load_state(folder: Path, trainer: Trainer, *, rank: int = 0) -> None:
    """Put optimiser, schedule and random generators back as `write_part` found them; the weights are loaded already.

    A rank that the checkpoint does not know keeps its generators. Raises ConfigError where the optimiser's state does
    not fit the model's parameters.
    """
    tensors = load_file(folder / STATE / "trainer.safetensors")
    path = folder / STATE / "trainer.json"
    try:
        saved = json.loads(path.read_bytes())
    except UNREADABLE as error:
        raise ConfigError(f"{path} is damaged, the trainer's state cannot be read: {error}") from error
    places = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    now = trainer.optimizer.state_dict()
    order = [places[id(p)] for group in trainer.optimizer.param_groups for p in group["params"]]
    state = {}
    for number, name in enumerate(order):
        if name in saved["optimizer"]:
            state[number] = _with_tensors(saved["optimizer"][name], tensors)
    if saved["optimizer"] and (missing := sorted(set(saved["optimizer"]) - set(order))):
        raise ConfigError(f"{folder}: the optimiser's state is of parameters that the model lacks: {missing[0]}")
    trainer.optimizer.load_state_dict({"state": state, "param_groups": now["param_groups"]})
    if (schedule := saved.get("schedule")) is not None and hasattr(trainer.schedule, "load_state_dict"):
        trainer.schedule.load_state_dict(schedule)
    if (cpu := tensors.get(f"generator/{rank}/cpu")) is not None:
        torch.set_rng_state(cpu)
    if (cuda := tensors.get(f"generator/{rank}/cuda")) is not None and trainer.device.type == "cuda":
        torch.cuda.set_rng_state(cuda, trainer.device)


def _write_state(folder: Path, trainer: Trainer, generators: Mapping[str, torch.Tensor]) -> None:
    folder.mkdir()
    tensors = dict(generators)
    places = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    state = {
        places[id(parameter)]: _without_tensors(values, f"optimizer/{places[id(parameter)]}", tensors)
        for parameter, values in trainer.optimizer.state.items()
    }
    schedule = trainer.schedule.state_dict() if hasattr(trainer.schedule, "state_dict") else None
    try:
        text = json.dumps({"optimizer": state, "schedule": schedule})
    except TypeError as error:
        owners = f"{type(trainer.optimizer).__name__} or {type(trainer.schedule).__name__}"
        raise PrlError(f"the state of {owners} holds what a checkpoint cannot: {error}") from error
    (folder / "trainer.json").write_text(text, encoding="utf-8")
    save_file(tensors, folder / "trainer.safetensors")


def _without_tensors(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """`value` for JSON: its tensors go into `tensors`, under names that begin with `name` and stand in their places."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {TENSOR: name}
    if isinstance(value, Mapping):
        return {str(key): _without_tensors(item, f"{name}/{key}", tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_tensors(item, f"{name}/{place}", tensors) for place, item in enumerate(value)]
    return value


def _with_tensors(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of `_without_tensors`, but for tuples, which come back as lists."""
    if isinstance(value, dict):
        if value.keys() == {TENSOR}:
            return tensors[value[TENSOR]]
        return {key: _with_tensors(item, tensors) for key, item in value.items()}
    return [_with_tensors(item, tensors) for item in value] if isinstance(value, list) else value


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
