"""Config of an inference engine, and the server command that follows from it."""

import sys
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from prl.config.schema import ModelConfig

MIN_BATCHED_TOKENS = 4096


@dataclass
class InferenceConfig:
    """vLLM servers of one model."""

    device: Annotated[str, Literal["auto", "cpu", "cuda"]] = "auto"
    """`auto`: CUDA where `nvidia-smi` finds a GPU, else the CPU."""
    host: str = "127.0.0.1"
    """Address the server binds to. Anything but loopback opens it to the network; the run's token still guards it."""
    port: Annotated[int, Ge(1), Le(65535)] | None = None
    """TCP port; null = a free one."""
    urls: list[str] = field(default_factory=list)
    """Base URLs of prl servers that already run, with this run's token in PRL_TOKEN; empty = start one."""
    max_num_seqs: Annotated[int, Ge(1)] = 256
    """Sequences the engine runs at once."""
    kv_cache_gb: Annotated[int, Gt(0)] = 1
    """KV cache on a CPU, GiB."""
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = 0.5
    """Share of GPU memory for the engine."""
    tensor_parallel_size: Annotated[int, Ge(1)] = 1
    """GPUs one server spans."""
    poll_s: Annotated[float, Ge(0)] = 0.0002
    """Sleep between looks at the engine's message queue on a CPU, seconds; 0 = vLLM's own busy loop."""
    args: dict[str, Any] = field(default_factory=dict)
    """Further vLLM server arguments, added as +inference.args.block-size=16."""
    startup_timeout_s: Annotated[float, Gt(0)] = 600.0
    """Deadline for the server to answer, seconds."""
    update_timeout_s: Annotated[float, Gt(0)] = 300.0
    """Deadline for one weight update of the policy, seconds. A frozen model is not updated."""


def server_command(
    cfg: InferenceConfig, *, model: ModelConfig, device: str, port: int, seed: int, name: str = "policy"
) -> list[str]:
    """The command line of a model server.

    Args:
        cfg: The server's settings.
        model: The model, with its path and number format resolved for this machine.
        device: `cpu` or `cuda`.
        port: TCP port to listen on.
        seed: The engine's own; requests carry theirs.
        name: The name that the model is served under.
    """
    command = [
        sys.executable,
        "-m",
        "prl.inference.server",
        "--model",
        model.path,
        "--served-model-name",
        name,
        "--host",
        cfg.host,
        "--port",
        str(port),
        "--dtype",
        model.dtype,
        "--max-model-len",
        str(model.max_model_len),
        "--max-num-seqs",
        str(cfg.max_num_seqs),
        "--seed",
        str(seed),
        "--disable-uvicorn-access-log",
        "--logprobs-mode",
        "processed_logprobs",
    ]
    command += _device_arguments(cfg, device, model.max_model_len)
    if model.trust_remote_code:
        command += ["--trust-remote-code"]
    for argument, value in cfg.args.items():
        flag = "--" + str(argument).replace("_", "-")
        command += [flag] if value is True else [f"--no-{flag[2:]}"] if value is False else [flag, str(value)]
    return command


def _device_arguments(cfg: InferenceConfig, device: str, max_model_len: int) -> list[str]:
    if device != "cpu":
        return [
            "--gpu-memory-utilization",
            str(cfg.gpu_memory_utilization),
            "--tensor-parallel-size",
            str(cfg.tensor_parallel_size),
        ]
    # vLLM rewinds a seeded request's random generator when its prompt is prefilled in chunks, which it cannot do on a
    # CPU: the engine dies ("CPU Generator does not use offset"). So whole prompts must fit.
    batched = max(MIN_BATCHED_TOKENS, max_model_len)
    return ["--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", str(batched)]


def server_environment(cfg: InferenceConfig, device: str) -> dict[str, str]:
    """Environment variables of a server process."""
    env = {"VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    if device == "cpu":
        env |= {"VLLM_CPU_KVCACHE_SPACE": str(cfg.kv_cache_gb), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        if cfg.poll_s > 0:
            env["PRL_ENGINE_POLL_S"] = str(cfg.poll_s)
    return env
