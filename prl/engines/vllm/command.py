"""The process of a vLLM server: its command line and its environment."""

import json
import os
import sys
from typing import Any

from prl.engines.base import EngineSpec
from prl.engines.vllm.cpu import PATCHES_VARIABLE, pictures
from prl.engines.vllm.options import as_arguments

MIN_BATCHED_TOKENS = 4096
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM makes room for (`MaxLoRARanks`)."""
LOOPBACK_ADDRESS = "127.0.0.1"
"""Address at which the ports of vLLM's own processes listen."""


def command_of(spec: EngineSpec, port: int) -> list[str]:
    """Return the command line of a server that listens on `port`."""
    config, model = spec.config, spec.model
    options: dict[str, Any] = {
        "model": model.path,
        "served-model-name": spec.served_name,
        "host": config.host,
        "port": port,
        "dtype": model.dtype,
        "max-model-len": model.max_model_len,
        "max-num-seqs": config.max_num_seqs,
        "seed": spec.seed,  # the engine's own; requests carry theirs
        "trust-remote-code": model.trust_remote_code,
        "disable-uvicorn-access-log": True,
        "logprobs-mode": "processed_logprobs",
    }
    if model.dtype in ("bfloat16", "float16"):
        # Logits in float32, as the trainer computes them: in bfloat16 one of 16 to 32 is off by up to 0.06.
        # `hf-overrides` of the user's own take its place.
        options["hf-overrides"] = '{"head_dtype": "float32"}'
    if spec.sees:
        options |= {
            "mm-device-do-normalize": False,  # requests have features that are normalised already
            "mm-processor-cache-gb": 0,  # prl's store keeps them
            "limit-mm-per-prompt": '{"video": 0}',
        }
    if spec.device == "cpu":
        options |= {
            "enforce-eager": True,
            "disable-log-stats": True,  # a tenth of the engine's time where a step is short
            # The worker runs within the engine core: one process and one import of torch less, and no queue between the
            # two whose reader spins on the core that the trainer needs.
            "distributed-executor-backend": "uni",
            # vLLM rewinds a seeded request's random generator when its prompt is prefilled in chunks, which it cannot
            # do on a CPU: the engine dies ("CPU Generator does not use offset"). So whole prompts must fit.
            "enable-chunked-prefill": False,
            "max-num-batched-tokens": max(MIN_BATCHED_TOKENS, model.max_model_len, config.max_num_seqs),
        }
    else:
        options |= {
            "gpu-memory-utilization": config.gpu_memory_utilization,
            "tensor-parallel-size": config.tensor_parallel_size,
        }
    if spec.weight_transfer != "prl":
        options["weight-transfer-config"] = json.dumps({"backend": spec.weight_transfer})
    options |= adapter_options(spec)
    if spec.evaluation_yields:
        options["scheduling-policy"] = "priority"
    return [sys.executable, "-m", "prl.engines.vllm.server", *as_arguments(options | config.args)]


def adapter_options(spec: EngineSpec) -> dict[str, Any]:
    """Return the options by which a server has adapters beside its model."""
    if spec.adapters is None:
        return {}
    rank = next(rank for rank in RANKS if rank >= spec.adapters.rank)
    return {"enable-lora": True, "max-loras": spec.adapters.count, "max-lora-rank": rank}


def environment_of(spec: EngineSpec) -> dict[str, str]:
    """Return the environment variables that vLLM reads."""
    env = {
        "SPT_NOENV": "1",  # else the title that vLLM gives a process overwrites what its environment says in /proc
        "VLLM_HOST_IP": LOOPBACK_ADDRESS,
    }
    if spec.device == "cpu":
        env |= {"VLLM_CPU_KVCACHE_SPACE": str(spec.config.kv_cache_gb), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        # Without them vLLM has errors with several adapters (`cpu/adapters.py`).
        env[PATCHES_VARIABLE] = "1" if spec.config.cpu_patches or spec.adapters else ""
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else vLLM gives the worker a process of its own after all
        if "--no-enforce-eager" not in command_of(spec, 0):
            # vLLM compiles a comparison of its sampler all the same, and torch the headers for it in each new temporary
            # folder: the first reply would wait seconds for both.
            env["TORCHDYNAMO_DISABLE"] = "1"
        if spec.sees:
            env |= {pictures.VARIABLE: "1", "PYTHONPATH": os.pathsep.join(pictures.search_path())}
    return env
