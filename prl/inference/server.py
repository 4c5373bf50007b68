"""A model server: vLLM's own OpenAI-compatible server, with token checks and, unless PRL_FROZEN is set, weight updates.

PRL_TOKEN=… python -m prl.inference.server --model DIR --port 8000 [any vLLM server argument]
"""

import os
import sys

from prl.inference import _vllm_internals
from prl.inference.auth import TOKEN_VARIABLE

FROZEN_VARIABLE = "PRL_FROZEN"
"""Set to anything, it makes a server that takes no weights."""

REQUIRED = [
    "--enable-scale-out",  # POST /inference/v1/generate: token ids in, token ids and logprobs out
    "--middleware=prl.inference.auth.TokenAuth",
]
"""Arguments of every prl server; the rest of the command line is vLLM's."""
LIVE = ["--worker-extension-cls=prl.inference.worker.PolicyWorker"]
"""Arguments of a server that takes new weights, by the route in `routes.py`."""


def main() -> None:
    """Serve with the arguments of the command line and those that every prl server has."""
    if not os.environ.get(TOKEN_VARIABLE):
        raise SystemExit(f"prl.inference.server: set {TOKEN_VARIABLE}; every request must carry it as a bearer token")
    if not any(arg.startswith("--host") for arg in sys.argv[1:]):
        sys.argv += ["--host", "127.0.0.1"]
    sys.argv += REQUIRED if os.environ.get(FROZEN_VARIABLE) else REQUIRED + LIVE
    os.environ["VLLM_PLUGINS"] = ",".join(_vllm_internals.plugin_names(os.environ.get("VLLM_PLUGINS")))
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    _vllm_internals.serve()


if __name__ == "__main__":
    main()
