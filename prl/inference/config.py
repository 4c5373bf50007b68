"""Config of an inference engine, and the server command that follows from it."""

import sys
from dataclasses import dataclass, field
from typing import Any

MIN_BATCHED_TOKENS = 4096


@dataclass
class InferenceConfig:
    """vLLM servers of one model."""

    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: CUDA where `nvidia-smi` finds a GPU."""
    host: str = "127.0.0.1"
    """Address the server binds to. Anything but loopback opens it to the network (the run's token still guards it)."""
    port: int | None = None
    """TCP port; null = a free one."""
    urls: list[str] = field(default_factory=list)
    """Base URLs of prl servers that already run (their PRL_TOKEN must be this run's); empty = start one."""
    max_num_seqs: int = 256
    """Sequences the engine runs at once."""
    kv_cache_gb: int = 1
    """KV cache on a CPU, GiB."""
    gpu_memory_utilization: float = 0.5
    """Share of GPU memory for the engine."""
    tensor_parallel_size: int = 1
    """GPUs one server spans."""
    poll_s: float = 0.0002
    """Sleep between looks at the engine's message queue on a CPU, seconds; 0 = vLLM's own busy loop."""
    args: dict[str, Any] = field(default_factory=dict)
    """Further vLLM server arguments, added as +inference.args.block-size=16."""
    startup_timeout_s: float = 600.0
    """Deadline for the server to answer, seconds."""
    update_timeout_s: float = 300.0
    """Deadline for one weight update, seconds (of the policy; a frozen model has none)."""


def server_command(
    cfg: InferenceConfig, *, model: dict, device: str, port: int, seed: int, name: str = "policy"
) -> list[str]:
    """The command line of a server of `model` (`path`, `dtype`, `max_model_len`, `trust_remote_code`) as `name`."""
    command = [
        sys.executable,
        "-m",
        "prl.inference.server",
        "--model",
        model["path"],
        "--served-model-name",
        name,
        "--host",
        cfg.host,
        "--port",
        str(port),
        "--dtype",
        model["dtype"],
        "--max-model-len",
        str(model["max_model_len"]),
        "--max-num-seqs",
        str(cfg.max_num_seqs),
        "--seed",
        str(seed),
        "--disable-uvicorn-access-log",
        "--logprobs-mode",
        "processed_logprobs",
    ]
    if device == "cpu":
        # A prompt prefilled in chunks rewinds its request's random generator, which vLLM cannot do on a CPU: the
        # engine dies ("CPU Generator does not use offset"). Whole prompts always fit.
        batched = max(MIN_BATCHED_TOKENS, model["max_model_len"])
        command += ["--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", str(batched)]
    else:
        command += ["--gpu-memory-utilization", str(cfg.gpu_memory_utilization)]
        command += ["--tensor-parallel-size", str(cfg.tensor_parallel_size)]
    if model["trust_remote_code"]:
        command += ["--trust-remote-code"]
    for argument, value in cfg.args.items():
        flag = "--" + str(argument).replace("_", "-")
        command += [flag] if value is True else [f"--no-{flag[2:]}"] if value is False else [flag, str(value)]
    return command


def server_environment(cfg: InferenceConfig, device: str) -> dict[str, str]:
    """Environment variables of a server process."""
    env = {"VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    if device == "cpu":
        env |= {"VLLM_CPU_KVCACHE_SPACE": str(cfg.kv_cache_gb), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        if cfg.poll_s > 0:
            env["PRL_ENGINE_POLL_S"] = str(cfg.poll_s)
    return env
