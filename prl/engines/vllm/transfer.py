"""vLLM's weight transfer engine of prl, which each worker process of a server has; vLLM's factory knows it as `prl`.

vLLM calls its four phases: `init_transfer_engine`, `start_weight_update`, `update_weights`, `finish_weight_update`.
Only processes of vLLM import this module, by the name of `WorkerExtension`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from prl.engines.vllm.weights import folder_of, policy_tensors
from prl.engines.vllm.worker import COPIED, Update, are_experts, layers_to_pack
from prl.transport import gloo


class WorkerExtension:
    """Nothing of its own: vLLM imports this module with it, before it makes the engine."""


@dataclass
class Meeting(WeightTransferInitInfo):
    """The sender of weights."""

    master_address: str
    master_port: int
    secret: str
    """What the members of the group know alone."""
    rank_offset: int
    """The place of the engine's first worker in the group."""
    world_size: int
    """Members of the group, the sender among them."""
    timeout_s: float


@dataclass
class NewWeights(WeightTransferUpdateInfo):
    """Weights to load: of a folder, or those that the sender has."""

    path: str | None = None
    """A folder with a model, or with an adapter of the one that the server began with; None = from the sender."""
    names: list[str] = field(default_factory=list)
    """Names of the sender's tensors, in the order in which they come."""
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)


class PolicyTransfer(WeightTransferEngine[Meeting, NewWeights]):
    """Loads new policy weights into the running engine, from a folder or from the trainer by gloo."""

    init_info_cls = Meeting
    update_info_cls = NewWeights
    group: gloo.Group = None
    update: Update | None = None
    halfway = False
    """An update has begun and not ended: another would take what that one has left for its own."""

    def init_transfer_engine(self, init_info: Meeting) -> None:
        parallel = self.parallel_config
        place = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.group = gloo.join(
            init_info.master_address,
            init_info.master_port,
            init_info.secret,
            init_info.rank_offset + place,
            init_info.world_size,
            init_info.timeout_s,
        )

    def start_weight_update(self) -> None:
        if self.halfway:
            raise RuntimeError("an earlier load failed half-way: start the engine again")
        if self.update is None:
            # Before the first update alone: what a layer was made with is not to be told afterwards.
            self.base = folder_of(self.model_config.model)
            self.update = self.first_update()

    def first_update(self) -> Update:
        """Look at the model, which stays the same in further updates."""
        cpu_alone = self.device.type == "cpu" and self.vllm_config.lora_config is None
        packed = layers_to_pack(self.model) if cpu_alone else None
        by_loaders = any(map(are_experts, self.model.modules())) and type(self.model).__name__ not in COPIED
        checked = not by_loaders and self.vllm_config.lora_config is None
        return Update(self.model, self.model_config, packed, checked=checked)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: NewWeights) -> None:
        assert self.update is not None  # vLLM calls `start_weight_update` before
        if update_info.path is not None:
            tensors = policy_tensors(update_info.path, self.base)
        elif self.group is not None:
            tensors = self._sent(update_info)
        else:
            raise RuntimeError("there is no sender: the first phase has not been")
        # Not before there is something to load: a folder may be gone by now, as an older version is. Then the weights
        # stay as they are, and the engine takes the next version.
        self.halfway = True
        self.update.start()
        self.update.load(tensors)
        if self.group is not None:
            gloo.part(self.group)
            self.group = None

    def _sent(self, info: NewWeights) -> Iterator[tuple[str, torch.Tensor]]:
        """Receive one tensor after the other. Each has memory of its own: vLLM may keep it until
        its layer is complete."""
        for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            gloo.broadcast(self.group, tensor)
            yield name, tensor

    def finish_weight_update(self) -> None:
        assert self.update is not None
        self.update.finish()
        self.halfway = False

    def shutdown(self) -> None:
        self.group = None


WeightTransferEngineFactory.register_engine("prl", PolicyTransfer)
