"""Environment variables of the processes that compute."""

import os
from pathlib import Path

from prl.config.schema import ModelConfig
from prl.models import cache_folder

LOOPBACK = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TP_SOCKET_IFNAME": "lo",
}
"""Variables that keep the ports of libraries on this machine; else they listen where its host name points."""


def model_environment(model: ModelConfig, threads: int) -> dict[str, str]:
    """Environment variables of every process that loads the model and computes with `threads` threads."""
    # A local folder needs nothing from the hub, and asking takes its time-outs.
    offline = {"HF_HUB_OFFLINE": "1"} if Path(model.path).is_dir() else {}
    return {
        "OMP_NUM_THREADS": str(threads),
        # Threads that wait for each other sleep. Spinning, they keep the core from the one that they wait for once
        # another process wants a core: on a busy machine, a step of `tiny` in two threads took ten times as long.
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **LOOPBACK,
        # What torch compiles is kept for the next run, and not among the temporary files of this one.
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(cache_folder() / "torchinductor"),
        **offline,
    }
