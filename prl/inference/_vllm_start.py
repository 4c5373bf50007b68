"""The start of vLLM's server, where it goes beyond vLLM's public interface.

Written for the version of vLLM in `worker.py`, and tested with it. vLLM is imported inside the functions: the
server sets the environment before the import.
"""

import contextlib
import functools
import importlib
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator
from importlib.metadata import distributions, entry_points
from types import FunctionType, ModuleType
from typing import Any

from prl import lazy_compiler, transformers_start

OPEN_REQUESTS_S = 2
"""[s] How long a server that was asked to end waits for requests that are open."""

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
    """Run vLLM's OpenAI-compatible server with the arguments of this process's command line."""
    import uvloop
    from vllm import env_override
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from prl.inference import cpu

    cli_env_setup()
    args = make_arg_parser(FlexibleArgumentParser()).parse_args()
    configure_logging_from_args(args)
    validate_parsed_serve_args(args)
    if os.environ.get(cpu.PATCHES_VARIABLE):
        cpu.install()
    if not args.enforce_eager:
        env_override._patch_inductor_fallback_allow_list()  # what `without_compiler` has left out
    with without_compiler() if args.enforce_eager else contextlib.nullcontext():
        uvloop.run(run_server(args))


async def run_server(args: Namespace) -> None:
    """Serve until the process is asked to end.

    vLLM's own `run_server` waits without end for open requests, of which some are never answered once its engine has
    ended; and while it starts, the exception by which it would end is lost.
    """
    from vllm.entrypoints.launchers.api_server.entry import run_server_worker
    from vllm.entrypoints.launchers.launcher import setup_server

    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))  # until it serves
    address, sock = setup_server(args, reuse_port=False)
    await run_server_worker(address, sock, args, timeout_graceful_shutdown=OPEN_REQUESTS_S)


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
