"""New weights for vLLM's engine, and all other uses of vLLM that go beyond its public interface, with their siblings.

`_vllm_start.py`, `_vllm_forward.py`, `_vllm_groups.py`, `_vllm_sampling.py` and
`_vllm_scheduling.py` are those. Written for vLLM 0.31.0.
`tests/inference/test_vllm_internals.py` fails when the installed version is another one, when something used here is
gone, or when a workaround is no longer needed. vLLM is imported inside the functions: the server sets the environment
before the import.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from prl.inference.weights import files_of, tensors_of

if TYPE_CHECKING:
    import torch
    from torch import nn
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.worker.gpu_worker import Worker

VERSION = "0.31.0"

Packed = list[tuple[Any, dict[str, "torch.Tensor"]]]
"""Layers, each with its weights as they were made, without numbers, before any had been loaded."""


UPDATE = "prl_update"
"""Our name for the core's method."""
PARTS = ("pause", "load", "clear")
"""Of an update, in the engine; `clear` includes resuming."""


class Interrupted(Exception):
    """Weights did not come, though the engine lives."""


async def update(engine: "AsyncLLM", method: str, kwargs: dict[str, Any]) -> dict[str, float]:
    """Have the workers load weights by a method of theirs; running requests are kept, and computed anew.

    Returns the seconds of each part.

    A load that fails may leave a mixture of weights: the engine stays paused until another one has succeeded.

    Raises:
        Interrupted: Where the method returned why in a worker, and not None.
        Exception: What the core says: its worker raised, or prefixes cached under the old weights are still in use.
    """
    found = await engine.engine_core.call_utility_async(UPDATE, method, kwargs)
    if isinstance(found, str):
        raise Interrupted(found)
    return cast("dict[str, float]", found)


def install() -> None:
    """vLLM general plugin (entry point `vllm.general_plugins`): give engine cores the method that `update` calls.

    Four messages of vLLM's do the same, and between them the engine does nothing.
    """
    from vllm.v1.engine.core import EngineCoreProc

    setattr(EngineCoreProc, UPDATE, update_core)


def update_core(core: "EngineCoreProc", method: str, kwargs: dict[str, Any]) -> "Future[dict[str, float] | str]":
    """Pause the scheduler, have the workers load the weights, drop what is cached under the old ones, resume.

    Gives the seconds of each part, or why weights did not come: then the scheduler stays paused.
    """
    began, result = time.monotonic(), Future[dict[str, float] | str]()

    def load(paused: "Future[None] | None") -> None:
        times = [began, time.monotonic()]
        try:
            if paused is not None:
                paused.result()
            if reasons := [reason for reason in core.collective_rpc(method, kwargs=kwargs) or () if reason is not None]:
                result.set_result(reasons[0])
                return
            times.append(time.monotonic())
            if not core.reset_prefix_cache(reset_running_requests=True):
                raise RuntimeError("prefixes cached under older weights are still in use")
            core.resume_scheduler()
            times.append(time.monotonic())
        except Exception as error:
            result.set_exception(error)
        else:
            seconds = (end - start for start, end in itertools.pairwise(times))
            result.set_result(dict(zip(PARTS, seconds, strict=True)))

    # `engine.pause_generation` does the same and then sleeps 20 ms to order outputs that are kept anyway.
    if (in_flight := core.pause_scheduler(mode="keep", clear_cache=False)) is None:
        load(None)
    else:
        from vllm.v1.engine import EngineCoreRequestType

        in_flight.add_done_callback(load)
        # It comes back to a loop that then waits for a message, also where there is work again.
        in_flight.add_done_callback(lambda _: core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None)))
    return result


def workers_of(engine: "AsyncLLM") -> int:
    """The workers of an engine, which has one for each GPU, or one on a CPU."""
    parallel = engine.vllm_config.parallel_config
    return parallel.world_size * parallel.data_parallel_size


class PolicyWorker:
    """Worker extension, mixed into vLLM's worker: loads new policy weights into the running engine."""

    halfway = False
    """Whether a reload of vLLM's has begun and not ended: another would take what that one has left for its own."""

    def load_policy(self, path: str) -> None:
        """Load the safetensors folder `path`, in Hugging Face names; refresh what vLLM derived from weights.

        Called by the route `/prl/load_policy`. If it raises, the weights are neither the old nor the new ones.
        """
        worker = cast("Worker", self)
        self.load_from(tensors_of(files_of(Path(path))), lambda: worker.reload_weights(weights_path=path))

    def load_from(self, tensors: "Iterable[tuple[str, torch.Tensor]]", reload: Callable[[], None]) -> None:
        """Load `tensors` in place, or, where that does not do for a layer, by `reload`, vLLM's way."""
        from vllm.config import set_current_vllm_config

        worker = cast("Worker", self)
        model = worker.model_runner.get_model()
        if self.packed_layers is None:
            if self.halfway:
                raise RuntimeError("an earlier load failed half-way: start the engine again")
            self.halfway = True
            forget_packed_experts(model)
            reload()
            refresh_output_heads(model)
            self.halfway = False
        else:
            with set_current_vllm_config(worker.vllm_config):
                load_in_place(model, self.packed_layers, tensors)

    @functools.cached_property
    def packed_layers(self) -> "Packed | None":
        """What `layers_to_pack` says of the model; None where weights are not loaded in place."""
        worker = cast("Worker", self)
        return None if worker.vllm_config.lora_config else layers_to_pack(worker.model_runner.get_model())


def layers_to_pack(model: "nn.Module") -> "Packed | None":
    """The layers whose weights vLLM packs once they are loaded, where no layer does anything else with them.

    Packed are linear layers, heads and experts on a CPU. None where numbers cannot be loaded where they are: a layer
    quantises them, keeps them in another shape or number format than it was made with, or makes others of them.
    """
    from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import to_meta_tensor

    if getattr(model, "secondary_weights", ()):
        return None
    packed: Packed = []
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        experts = are_packed_experts(layer)
        if not experts and type(method) not in (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            return None
        if is_deferred_attention_layer(layer) and type(layer) is not Attention:
            return None
        as_made = get_layerwise_info(layer).restore_metadata[0]  # without biases
        packs = hasattr(layer, "cpu_linear")
        weights = list(as_made) if experts else ["weight"] * packs
        if weights:  # copies: a reload changes the originals' loaders
            packed.append((layer, {name: to_meta_tensor(as_made[name]) for name in weights}))
        for name, made in as_made.items():
            now = layer._parameters.get(name)
            if now is not None and name in weights and (experts or not now.numel()):
                continue  # packed away
            if now is None or (now.shape, now.stride(), now.dtype) != (made.shape, made.stride(), made.dtype):
                return None
    return packed


def load_in_place(model: Any, packed: "Packed", tensors: "Iterable[tuple[str, torch.Tensor]]") -> None:
    """Have a model load numbers where they are; `packed` are its `layers_to_pack`, of before the first load.

    vLLM's reload goes layer by layer, through copies without numbers and each number twice. Here a layer whose numbers
    are packed away has plain ones in between, and cannot run: what fails half-way is not sampled from.
    """
    from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    forget_packed_experts(model)
    for layer, as_made in packed:
        layer.__dict__.pop("cpu_linear", None)  # gone already where a load before this one has failed
        for name, made in as_made.items():
            if are_packed_experts(layer) or not getattr(layer, name).numel():
                setattr(layer, name, restore_layer_refs(materialize_meta_tensor(made), layer))
    model.load_weights(tensors)
    for layer, _ in packed:
        layer.quant_method.process_weights_after_loading(layer)


def are_packed_experts(layer: "nn.Module") -> bool:
    """Whether a layer is the experts of one, not quantised, on a CPU."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.platforms import current_platform

    return current_platform.is_cpu() and type(getattr(layer, "quant_method", None)) is UnquantizedFusedMoEMethod


def forget_packed_experts(model: "nn.Module") -> None:
    """Have experts on a CPU packed when weights have been loaded, as they were the first time; until then none can run.

    Where vLLM has a kernel for them already, it leaves what it loads as it is, for a kernel that takes it as packed.
    """
    for layer in model.modules():
        if are_packed_experts(layer):
            cast("Any", layer).quant_method.moe_kernel = None


def refresh_output_heads(model: "nn.Module") -> None:
    """Rebuild the prepacked copy of the output head's weight that vLLM keeps on CPU.

    A reload does not rebuild it when the head is tied to the embedding, and the engine would go on sampling with the
    old head.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
