"""New weights for vLLM's engine, and all other uses of vLLM that go beyond its public interface, with their siblings.

`_vllm_start.py`, `_vllm_forward.py`, `_vllm_groups.py`, `_vllm_sampling.py`, `_vllm_scheduling.py`
and `_vllm_twin.py` are those. Written for vLLM 0.31.0.
`tests/inference/test_vllm_internals.py` fails when the installed version is another one, when something used here is
gone, or when a workaround is no longer needed. vLLM is imported inside the functions: the server sets the environment
before the import.
"""

import functools
import itertools
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from prl.inference._vllm_twin import Packed, Twin, are_packed_experts, forget_packed_experts
from prl.inference.weights import files_of, tensors_of

if TYPE_CHECKING:
    from torch import nn
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.worker.gpu_worker import Worker

VERSION = "0.31.0"

PREPARE, UPDATE = "prl_prepare", "prl_update"
"""Our names for the core's methods."""
STANDSTILL = ("pause", "load", "take over", "clear")
"""Parts of an update during which the engine does nothing else; `clear` includes resuming."""
LARGE = 2**25
"""Bytes of weights from which on a thread loads them. Of small ones there is more to do in Python than to copy, and two
threads that hand its lock to each other at every operation take longer than one after the other: 10 ms of the engine's
time instead of 7 for 3.6 MB in 46 tensors."""


async def update(engine: "AsyncLLM", path: str, size: int) -> dict[str, float]:
    """Have the workers load weights (`PolicyWorker.load_policy`); running requests are kept, and computed anew.

    Workers that can load weights beside those that the engine has; of large ones while it goes on. With others a load
    that fails may leave a mixture.

    Args:
        engine: The server's.
        path: The folder of the weights.
        size: Their bytes.

    Returns the seconds of each part: `beside`, while the engine goes on, and those of `STANDSTILL`.

    Raises:
        Exception: What the core says: its worker raised, or prefixes cached under the old weights are still in use.
        Then the engine is paused until another update has succeeded, unless it has gone on until then.
    """
    beside = await engine.engine_core.call_utility_async(PREPARE, path) if size >= LARGE else None
    loaded = {} if beside is None else {"beside": beside}
    found = await engine.engine_core.call_utility_async(UPDATE, None if loaded else path)
    return loaded | cast("dict[str, float]", found)


def install() -> None:
    """vLLM general plugin (entry point `vllm.general_plugins`): give engine cores the methods that `update` calls.

    Four messages of vLLM's do the same as the second, and between them the engine does nothing.
    """
    from vllm.v1.engine.core import EngineCoreProc

    setattr(EngineCoreProc, PREPARE, prepare_core)
    setattr(EngineCoreProc, UPDATE, update_core)


def prepare_core(core: "EngineCoreProc", path: str) -> "Future[float] | None":
    """Have a thread load the weights beside those that the worker runs with; None where that cannot be.

    Gives the seconds that it took. Workers in other processes do one thing at a time.
    """
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    if type(core.model_executor) is not UniProcExecutor or not all(core.collective_rpc("prepares")):
        return None
    began, result = time.monotonic(), Future[float]()

    def load() -> None:
        try:
            core.collective_rpc("load_policy", args=(path,))
        except Exception as error:
            result.set_exception(error)
        else:
            result.set_result(time.monotonic() - began)

    threading.Thread(target=load, name=PREPARE, daemon=True).start()
    return result


def update_core(core: "EngineCoreProc", path: str | None) -> "Future[dict[str, float]]":
    """Pause the scheduler, have the workers load the weights, drop what is cached under the old ones, resume.

    Without a path they have been loaded. Gives the seconds of each part.
    """
    began, result = time.monotonic(), Future[dict[str, float]]()

    def load(paused: "Future[None] | None") -> None:
        times = [began, time.monotonic()]
        try:
            if paused is not None:
                paused.result()
            if path is not None:
                core.collective_rpc("load_policy", args=(path,))
            times.append(time.monotonic())
            core.collective_rpc("take_over")
            times.append(time.monotonic())
            if not core.reset_prefix_cache(reset_running_requests=True):
                raise RuntimeError("prefixes cached under older weights are still in use")
            core.resume_scheduler()
            times.append(time.monotonic())
        except Exception as error:
            result.set_exception(error)
        else:
            seconds = (end - start for start, end in itertools.pairwise(times))
            result.set_result(dict(zip(STANDSTILL, seconds, strict=True)))

    # `engine.pause_generation` does the same and then sleeps 20 ms to order outputs that are kept anyway.
    if (in_flight := core.pause_scheduler(mode="keep", clear_cache=False)) is None:
        load(None)
    else:
        from vllm.v1.engine import EngineCoreRequestType

        in_flight.add_done_callback(load)
        # It comes back to a loop that then waits for a message, also where there is work again.
        in_flight.add_done_callback(lambda _: core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None)))
    return result


class PolicyWorker:
    """Worker extension, mixed into vLLM's worker: loads new policy weights into the running engine."""

    halfway = False
    """Whether a reload of vLLM's has begun and not ended: another would take what that one has left for its own."""

    twin: Twin | None = None
    """Weights that are to take over."""

    def load_policy(self, path: str) -> None:
        """Load the safetensors folder `path`, in Hugging Face names: beside the model's weights, where this worker
        `prepares`, until `take_over`, or in place.

        Where neither does for a layer, vLLM's reload loads them; then what vLLM derived from weights is made anew.
        Unless it prepares, weights are neither the old nor the new ones if it raises. Called by the route
        `/prl/load_policy`.
        """
        from vllm.config import set_current_vllm_config

        worker = cast("Worker", self)
        model = worker.model_runner.get_model()
        if self.packed_layers is None:
            if self.halfway:
                raise RuntimeError("an earlier load failed half-way: start the engine again")
            self.halfway = True
            forget_packed_experts(model)
            worker.reload_weights(weights_path=path)
            refresh_output_heads(model)
            self.halfway = False
            return
        tensors = tensors_of(files_of(Path(path)))
        with set_current_vllm_config(worker.vllm_config):
            if self.prepares():
                self.twin = None
                twin = Twin(model, self.packed_layers)
                twin.load(tensors)
                self.twin = twin
            else:
                model.load_weights(tensors)

    def prepares(self) -> bool:
        """Whether weights are loaded beside those that the engine runs with: where layers pack them, on a CPU."""
        return bool(self.packed_layers)

    def take_over(self) -> None:
        """Run with the weights that have been loaded beside the model's, if any have, from now on."""
        if self.twin is not None:
            self.twin.take_over()
            self.twin = None
        for layer in self.layers_with_sinks:
            layer.attn.impl.sinks = layer.sinks  # else a copy, made at first use, in float32 of float16

    @functools.cached_property
    def layers_with_sinks(self) -> list[Any]:
        """Those of the model, on a CPU."""
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return []
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

        def has_some(layer: Any) -> bool:
            impl = getattr(getattr(layer, "attn", None), "impl", None)
            return isinstance(impl, CPUAttentionBackendImpl) and impl.sinks is not None and hasattr(layer, "sinks")

        return list(filter(has_some, cast("Worker", self).model_runner.get_model().modules()))

    @functools.cached_property
    def packed_layers(self) -> Packed | None:
        """What `layers_to_pack` says of the model; None where vLLM's reload loads weights."""
        worker = cast("Worker", self)
        return None if worker.vllm_config.lora_config else layers_to_pack(worker.model_runner.get_model())


def layers_to_pack(model: "nn.Module") -> Packed | None:
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
