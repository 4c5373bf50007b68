"""The start of vLLM's server, where it goes beyond vLLM's public interface.

Written for the version of vLLM in `worker.py`, and tested with it. vLLM is imported inside the functions: the
server sets the environment before the import.
"""

import contextlib
import functools
import importlib
import mmap
import multiprocessing
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import distributions, entry_points
from types import FunctionType, ModuleType
from typing import Any

from prl import lazy_compiler, transformers_start

ROUTES = (
    "model_hosting_container_standards.sagemaker",
    "prl.inference.routes",
    "vllm.entrypoints.openai.chat_completion.api_router",
    "vllm.entrypoints.openai.responses.api_router",
    "vllm.entrypoints.scale_out.render.api_router",
    "vllm.entrypoints.serve.tokenize.api_router",
)
"""Modules that the server imports once its engine core is ready, and that take it longest."""
OPEN_REQUESTS_S = 2
"""[s] How long a server that was asked to end waits for requests that are open."""
ALONE = "alone"
"""Our name of the backend of process groups with one rank."""

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

    from prl.inference import _vllm_forward, _vllm_scheduling

    work = entry.run_server_worker

    async def run_server_worker(*args: Any, **kwargs: Any) -> None:
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))  # until it serves
        await work(*args, timeout_graceful_shutdown=OPEN_REQUESTS_S, **kwargs)

    entry.run_server_worker = run_server_worker
    fork_engine()
    eager = "--enforce-eager" in sys.argv
    if not eager:
        env_override._patch_inductor_fallback_allow_list()  # what `without_compiler` has left out
    if current_platform.is_cpu():
        _vllm_scheduling.keep_blocks()
        _vllm_forward.run_prefixes_once()
        _vllm_forward.normalise_in_one_kernel()
        _vllm_forward.draw_noise_once()
        take_memory_as_used()
    with without_compiler() if eager else contextlib.nullcontext():
        entry.main()


def import_ahead() -> None:
    """Import what `serve` needs, before the model and the arguments are known."""
    lazy_compiler.install()
    lazy_compiler.check_plainly()
    with without_compiler():
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            transformers_start.without_sharding()  # vLLM shards models itself, and none here
            if not list(distributions(name="vllm")):  # it would import Triton, ask for its own version, and give up
                with hidden("triton"):
                    from vllm import triton_utils  # noqa: F401
        with later_name("torch._dynamo.symbolic_convert", "InliningInstructionTranslator"):
            from vllm.compilation import decorators  # noqa: F401
        from vllm.entrypoints.launchers.api_server import entry  # noqa: F401

        if current_platform.is_cpu():  # its worker runs in a fork of this process
            with later_name("torch._inductor.runtime.triton_helpers", "libdevice"):  # for kernels of GPUs
                from vllm.v1.worker import cpu_worker  # noqa: F401
            from vllm.model_executor.layers.quantization.online import base  # noqa: F401


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Have the block import vLLM without torch's compiler, a second of a core that an eager engine has no use for.

    `torch.compile` compiles when its function is called, if at all. vLLM's import takes a list of operators of the
    compiler for its own, and does without where there is no compiler; `serve` has it do so later, where its engine
    compiles. Which kernels of Triton an operator calls, the compiler alone asks, and on a CPU there are none.
    """
    import torch
    from torch._library import triton

    now, kernels_of = torch.compile, triton.get_inner_triton_kernels
    disabled = os.environ.get("TORCHDYNAMO_DISABLE") == "1"  # torch imports its compiler, and leaves the function alone

    def later(function: Any = None, **options: Any) -> Any:
        if function is None:
            return functools.partial(later, **options)
        if not isinstance(function, FunctionType):
            return now(function, **options)
        compiled = functools.cache(lambda: function if disabled else now(function, **options))
        return functools.wraps(function)(lambda *args, **named: compiled()(*args, **named))

    torch.compile = later  # type: ignore[assignment]
    try:
        with hidden("torch._inductor"):
            import vllm.env_override  # noqa: F401
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            triton.get_inner_triton_kernels = lambda fn: []
        yield
    finally:
        torch.compile, triton.get_inner_triton_kernels = now, kernels_of


@contextlib.contextmanager
def hidden(module: str) -> Iterator[None]:
    """Have the block find no such module, unless it is there already."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]


@contextlib.contextmanager
def later_name(module: str, name: str) -> Iterator[None]:
    """Have the block import `name` without its module, which is imported once an attribute of that is asked for."""

    class Later:
        def __getattr__(self, attribute: str) -> Any:
            return getattr(getattr(importlib.import_module(module), name), attribute)

        def __setattr__(self, attribute: str, value: Any) -> None:
            setattr(getattr(importlib.import_module(module), name), attribute, value)

        def __delattr__(self, attribute: str) -> None:
            delattr(getattr(importlib.import_module(module), name), attribute)

    if module in sys.modules:
        yield
        return
    sys.modules[module] = light = ModuleType(module)
    vars(light)[name] = Later()
    try:
        yield
    finally:
        del sys.modules[module]


def fork_engine() -> None:
    """Have the engine core be a fork of the server on a CPU, where vLLM's spawned one imports everything once more.

    A fork is not safe where OpenMP has threads: the server has none, for it computes nothing.
    """
    from vllm.platforms import current_platform
    from vllm.v1.engine import utils

    if current_platform.is_cpu():
        utils.get_mp_context = lambda: multiprocessing.get_context("fork")
        os.register_at_fork(after_in_child=leave_server)
        wait = utils.wait_for_engine_startup

        def import_meanwhile(*args: Any, **options: Any) -> Any:  # all forks are made: no lock of an import is in one
            threading.Thread(target=import_routes, daemon=True).start()
            return wait(*args, **options)

        utils.wait_for_engine_startup = import_meanwhile


def import_routes() -> None:
    """Import what the server needs next, while it waits for the engine core."""
    for name in ROUTES:
        with contextlib.suppress(Exception):  # said where the server imports it
            importlib.import_module(name)


def take_memory_as_used() -> None:
    """Have a CPU engine's key-value cache take memory as it is used, and not at the start: a second for each GB.

    vLLM writes zeros all over it. What the system hands out is zero already.
    """
    import torch
    from vllm.v1.worker import gpu_model_runner, utils

    allocate, written = utils.allocate_kv_cache, torch.zeros

    def zeros(size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=dtype)

    def allocate_unwritten(*args: Any, **options: Any) -> dict[str, torch.Tensor]:
        torch.zeros = zeros  # type: ignore[assignment]
        try:
            return allocate(*args, **options)
        finally:
            torch.zeros = written

    gpu_model_runner.allocate_kv_cache = allocate_unwritten


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
