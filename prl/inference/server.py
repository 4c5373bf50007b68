"""A model server: vLLM's own OpenAI-compatible server, with token checks and, unless PRL_FROZEN is set, weight updates.

PRL_TOKEN=… python -m prl.inference.server --model DIR --port 8000 [any vLLM server argument]
"""

import os
import sys
from importlib.metadata import entry_points

from prl.inference.auth import TOKEN_VARIABLE

FROZEN_VARIABLE = "PRL_FROZEN"

# Every prl server has these; the rest of the command line is vLLM's.
REQUIRED = [
    "--enable-scale-out",  # POST /inference/v1/generate: token ids in, token ids and logprobs out
    "--middleware=prl.inference.auth.TokenAuth",
]
LIVE = ["--worker-extension-cls=prl.inference.worker.PolicyWorker"]  # takes the weights that `routes` hands on


def main() -> None:
    if not os.environ.get(TOKEN_VARIABLE):
        raise SystemExit(f"prl.inference.server: set {TOKEN_VARIABLE}; every request must carry it as a bearer token")
    if not any(arg.startswith("--host") for arg in sys.argv[1:]):
        sys.argv += ["--host", "127.0.0.1"]
    sys.argv += REQUIRED if os.environ.get(FROZEN_VARIABLE) else REQUIRED + LIVE
    os.environ["VLLM_PLUGINS"] = ",".join(plugins())
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


def plugins() -> list[str]:
    """What vLLM may load: endpoint plugins only load by name, and naming one turns everything unnamed off."""
    named = os.environ.get("VLLM_PLUGINS")
    if named is not None:
        return sorted({*named.split(","), "prl"} - {""})
    groups = ("vllm.general_plugins", "vllm.platform_plugins", "vllm.io_processor_plugins", "vllm.stat_logger_plugins")
    return sorted({"prl", *(entry.name for group in groups for entry in entry_points(group=group))})


if __name__ == "__main__":
    main()
