"""Every use of vLLM that goes beyond its public interface: patches, internal methods, knowledge of its internals.

Written for vLLM 0.31.0. `tests/inference/test_vllm_internals.py` fails when the installed version is another one, when
something used here is gone, or when a workaround is no longer needed. vLLM is imported inside the functions: the server
sets the environment before the import.
"""

import contextlib
import functools
import multiprocessing
import os
import signal
import socket
import stat
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from prl.inference.weights import files_of, tensors_of

if TYPE_CHECKING:
    import torch
    from torch import nn
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.worker.gpu_worker import Worker

VERSION = "0.31.0"

OPEN_REQUESTS_S = 2
"""[s] How long a server that was asked to end waits for requests that are open."""
ALONE = "alone"
"""Our name of the backend of process groups with one rank."""

Packed = list[tuple[Any, "torch.Tensor"]]
"""Layers, each with its weight as it was made, without numbers, before any had been loaded."""

ENDPOINT_PLUGIN = "prl"
PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)
"""Entry point groups whose plugins vLLM loads unless a list of names is given."""


def plugin_names(listed: str | None) -> list[str]:
    """Return what `VLLM_PLUGINS` must list, so that vLLM loads prl's endpoint plugin and everything that it would load.

    An endpoint plugin is loaded only if it is listed, and a list turns everything off that it does not name.

    Args:
        listed: The value of `VLLM_PLUGINS` as the user set it; None if it is unset.
    """
    if listed is not None:
        return sorted({*listed.split(","), ENDPOINT_PLUGIN} - {""})
    return sorted({ENDPOINT_PLUGIN, *(entry.name for group in PLUGIN_GROUPS for entry in entry_points(group=group))})


def serve() -> None:
    """Run vLLM's OpenAI-compatible server with the arguments of this process's command line.

    Asked to end, vLLM's ends its engine and then waits for the open requests, of which some are never answered.
    While it starts, the exception by which it would end is lost, and it waits for an engine that waits for it.
    """
    from vllm import env_override
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.platforms import current_platform

    from prl.inference import _vllm_forward

    work = entry.run_server_worker

    async def run_server_worker(*args: Any, **kwargs: Any) -> None:
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))  # until it serves
        await work(*args, timeout_graceful_shutdown=OPEN_REQUESTS_S, **kwargs)

    entry.run_server_worker = run_server_worker
    fork_engine()
    if current_platform.is_cpu():
        if "--enforce-eager" not in sys.argv:
            env_override._patch_inductor_fallback_allow_list()  # what `without_compiler` has left out
        _vllm_forward.run_prompts_once()
        _vllm_forward.normalise_in_one_kernel()
    entry.main()


def import_ahead() -> None:
    """Import what `serve` needs, before the model and the arguments are known."""
    with without_compiler():
        from vllm.entrypoints.launchers.api_server import entry  # noqa: F401
        from vllm.platforms import current_platform

        if current_platform.is_cpu():  # its worker runs in a fork of this process
            from vllm.v1.worker import cpu_worker  # noqa: F401


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Have the block import vLLM without torch's compiler, a second of a core that an eager engine has no use for.

    `torch.compile` compiles when its function is called. vLLM's import takes a list of operators of the compiler for
    its own, and does without where there is no compiler; `serve` has it do so later, where its engine compiles.
    """
    import torch

    compiler, now = "torch._inductor", torch.compile

    def later(function: Any = None, **options: Any) -> Any:
        if function is None:
            return functools.partial(later, **options)
        compiled = functools.cache(lambda: now(function, **options))
        return functools.wraps(function)(lambda *args, **named: compiled()(*args, **named))

    missing = compiler not in sys.modules
    torch.compile = later  # type: ignore[assignment]
    try:
        if missing:
            sys.modules[compiler] = None  # type: ignore[assignment]
        import vllm.env_override  # noqa: F401

        if missing:
            del sys.modules[compiler]
        yield
    finally:
        torch.compile = now


def fork_engine() -> None:
    """Have the engine core be a fork of the server on a CPU, where vLLM's spawned one imports everything once more.

    A fork is not safe where OpenMP has threads: the server has none, for it computes nothing.
    """
    from vllm.platforms import current_platform
    from vllm.v1.engine import utils

    if current_platform.is_cpu():
        utils.get_mp_context = lambda: multiprocessing.get_context("fork")
        os.register_at_fork(after_in_child=leave_server)


def leave_server() -> None:
    """Let go, in a fork of the server, of what is the server's: its event loop's ear for signals, and its port."""
    signal.set_wakeup_fd(-1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # that of the listing is closed
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as found:
                    if found.family in (socket.AF_INET, socket.AF_INET6):
                        os.dup2(nothing, number)


def check_arguments() -> None:
    """Read this process's command line as the server would, and end as it does where it cannot."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    make_arg_parser(FlexibleArgumentParser()).parse_args()


def without_sockets() -> None:
    """Have process groups of one rank open no ports, in this process and those forked from it.

    vLLM's worker makes a dozen of gloo's groups, also where it is alone, and each listens on a TCP port without any
    check of who connects. torch's `FakeProcessGroup` does what a group of one has to: nothing is exchanged.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import FakeProcessGroup

    init_process_group, new_group = dist.init_process_group, dist.new_group

    def init_alone(backend: str | None = None, *args: Any, **options: Any) -> None:
        init_process_group(ALONE if backend == "gloo" and options.get("world_size") == 1 else backend, *args, **options)

    def new_alone(ranks: Any = None, timeout: Any = None, backend: str | None = None, **options: Any) -> Any:
        return new_group(
            ranks, timeout, ALONE if backend == "gloo" and dist.get_world_size() == 1 else backend, **options
        )

    if ALONE not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            ALONE, lambda store, rank, size, timeout: FakeProcessGroup._create_internal(rank, size), devices=["cpu"]
        )
        dist.init_process_group, dist.new_group = init_alone, new_alone  # type: ignore[assignment]


async def pause_scheduler(engine: "AsyncLLM") -> None:
    """Stop scheduling, and keep the running requests and the caches.

    `engine.pause_generation` does the same and then sleeps 20 ms to order outputs that are kept anyway.
    """
    await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)


async def resume_scheduler(engine: "AsyncLLM") -> None:
    """Go on with the requests that `pause_scheduler` kept."""
    await engine.engine_core.resume_scheduler_async()


class PolicyWorker:
    """Worker extension, mixed into vLLM's worker: loads new policy weights into the running engine."""

    halfway = False
    """Whether a reload of vLLM's has begun and not ended: another would take what that one has left for its own."""

    def load_policy(self, path: str) -> None:
        """Load the safetensors folder `path`, in Hugging Face names; refresh what vLLM derived from weights.

        Called by the route `/prl/load_policy`. If it raises, the weights are neither the old nor the new ones.
        """
        from vllm.config import set_current_vllm_config

        worker = cast("Worker", self)
        model = worker.model_runner.get_model()
        if self.packed_layers is None:
            if self.halfway:
                raise RuntimeError("an earlier load failed half-way: start the engine again")
            self.halfway = True
            worker.reload_weights(weights_path=path)
            refresh_output_heads(model)
            self.halfway = False
        else:
            with set_current_vllm_config(worker.vllm_config):
                load_in_place(model, self.packed_layers, tensors_of(files_of(Path(path))))

    @functools.cached_property
    def packed_layers(self) -> "Packed | None":
        """What `layers_to_pack` says of the model; None where weights are not loaded in place."""
        worker = cast("Worker", self)
        return None if worker.vllm_config.lora_config else layers_to_pack(worker.model_runner.get_model())


def layers_to_pack(model: "nn.Module") -> "Packed | None":
    """The layers whose weights vLLM packs once they are loaded, where no layer does anything else with them.

    Packed are linear layers and heads on a CPU. None where numbers cannot be loaded where they are: a layer quantises
    them, keeps them in another shape or number format than it was made with, or makes others of them.
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
        if type(method) not in (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            return None
        if is_deferred_attention_layer(layer) and type(layer) is not Attention:
            return None
        as_made = get_layerwise_info(layer).restore_metadata[0]  # without biases
        packs = hasattr(layer, "cpu_linear")
        if packs:
            packed.append((layer, to_meta_tensor(as_made["weight"])))  # a copy: a reload changes the original's loader
        for name, made in as_made.items():
            now = layer._parameters.get(name)
            if packs and now is not None and not now.numel():
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

    for layer, as_made in packed:
        layer.__dict__.pop("cpu_linear", None)  # gone already where a load before this one has failed
        if not layer.weight.numel():
            layer.weight = restore_layer_refs(materialize_meta_tensor(as_made), layer)
    model.load_weights(tensors)
    for layer, _ in packed:
        layer.quant_method.process_weights_after_loading(layer)


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


if __name__ == "__main__":
    check_arguments()
