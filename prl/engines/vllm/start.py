"""The start of vLLM's server, where it goes beyond vLLM's public interface.

Written for the version of vLLM in `worker.py`, and tested with it. vLLM is imported inside the functions: the
server sets the environment before the import.
"""

import gc
import os
import signal
from argparse import Namespace
from importlib.metadata import entry_points

from prl.base import garbage
from prl.base.errors import signal_name
from prl.engines.vllm.cpu import pictures

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
    with garbage.loading():
        if os.environ.get(pictures.VARIABLE):
            pictures.install()
        import uvloop
        from vllm.entrypoints.launchers.api_server import entry  # noqa: F401  what `run_server` imports
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
        from vllm.logger import configure_logging_from_args
        from vllm.utils.argparse_utils import FlexibleArgumentParser

    from prl.engines.vllm import cpu

    gc.freeze()  # vLLM collects three times before it serves, and so does its engine core, a fork of this process
    cli_env_setup()
    args = make_arg_parser(FlexibleArgumentParser()).parse_args()
    configure_logging_from_args(args)
    validate_parsed_serve_args(args)
    if os.environ.get(cpu.PATCHES_VARIABLE):
        cpu.install()
    name_killers()
    uvloop.run(run_server(args))


def name_killers() -> None:
    """Print which signal has ended an engine core, beside what vLLM says: that it died unexpectedly."""
    from vllm.v1.engine.utils import CoreEngineProcManager

    monitor = CoreEngineProcManager.monitor_engine_liveness

    def monitor_and_name(self: CoreEngineProcManager) -> None:
        monitor(self)
        code = self.finished_procs().get(self.failed_proc_name or "", 0)
        if code < 0:
            print(f"its engine core was {signal_name(-code)}", flush=True)

    CoreEngineProcManager.monitor_engine_liveness = monitor_and_name


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
