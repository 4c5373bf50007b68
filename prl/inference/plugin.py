"""vLLM general plugin (entry point `vllm.general_plugins`), loaded in every process of the engine.

It changes only engines that prl starts on a CPU: those have `PRL_ENGINE_POLL_S` set.
"""

import os

from prl.inference import _vllm_internals


def register() -> None:
    """Let the engine's processes sleep `PRL_ENGINE_POLL_S` seconds between two looks at their message queue."""
    if poll_s := os.environ.get("PRL_ENGINE_POLL_S"):
        _vllm_internals.sleep_between_reads(float(poll_s))
