"""The engine core is a fork of the server: vLLM's spawned one imports everything once more.

An engine takes 5.5 s of a core to start with this and 14.7 without, 26 s and 63 on a machine that does much else. A
fork is not safe where OpenMP has threads: the server has none, for it computes nothing. To be removed once vLLM leaves
`VLLM_WORKER_MULTIPROC_METHOD` as it is set on a CPU (`CpuPlatform.check_and_update_config` sets it to `spawn`).
"""

import multiprocessing


def fork_engine() -> None:
    """Patch vLLM in this process."""
    from vllm.v1.engine import utils

    utils.get_mp_context = lambda: multiprocessing.get_context("fork")
