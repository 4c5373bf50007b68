"""Options of vLLM's server: what `engine.args` must not hold, for prl sets it itself or it would open the engine."""

from collections.abc import Mapping
from typing import Any

from prl.base.errors import ConfigError

OWN_KEYS = {
    "host": "engine.host",
    "port": "engine.port",
    "model": "model.path",
    "dtype": "model.dtype",
    "max-model-len": "model.max_model_len",
    "trust-remote-code": "model.trust_remote_code",
    "max-num-seqs": "engine.max_num_seqs",
    "gpu-memory-utilization": "engine.gpu_memory_utilization",
    "device-memory-utilization": "engine.gpu_memory_utilization",
    "tensor-parallel-size": "engine.tensor_parallel_size",
    "data-parallel-size": "engine.servers",
}
"""Options that have a key of prl's own, under the prefix of the node."""
REFUSED = frozenset({
    "uds", "root-path", "grpc", "headless", "ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "ssl-cert-reqs",
    "ssl-ciphers", "enable-ssl-refresh", "middleware", "worker-extension-cls", "logits-processors", "api-key",
    "hf-token", "served-model-name", "logprobs-mode", "max-logprobs", "scheduling-policy", "seed",
    "enable-scale-out", "weight-transfer-config", "disable-uvicorn-access-log", "disable-log-stats", "config", "help",
    "version",
})  # fmt: skip
"""Others that prl sets itself, or that open the engine to others or change the logprobs that it returns."""
ON_A_CPU = frozenset({
    "enforce-eager", "distributed-executor-backend", "enable-chunked-prefill", "max-num-batched-tokens",
    "long-prefill-token-threshold",
})  # fmt: skip
"""Those that prl sets on a CPU, where vLLM cannot prefill the prompt of a seeded request in parts."""


def as_arguments(options: Mapping[str, Any]) -> list[str]:
    """Options as vLLM's command line has them."""
    arguments: list[str] = []
    for option, value in options.items():
        name = str(option).replace("_", "-")
        arguments += [f"--no-{name}" if value is False else f"--{name}"]
        arguments += [] if isinstance(value, bool) else [str(value)]
    return arguments


def check_options(args: Mapping[str, Any], prefix: str, *, device: str) -> None:
    """Raise ConfigError for an option of `args`, in either spelling, that prl does not leave to the user.

    Args:
        args: The server's arguments as the config has them.
        prefix: Of the keys of the model and the engine, "" or "teacher.".
        device: What the engine runs on, `cpu` or `cuda`.
    """
    refused = REFUSED | ON_A_CPU if device == "cpu" else REFUSED
    for given in args:
        option = str(given).replace("_", "-").removeprefix("no-")
        if option in OWN_KEYS or option in refused:
            remedy = f"write {prefix}{OWN_KEYS[option]}=…" if option in OWN_KEYS else "leave it out"
            raise ConfigError(f"{prefix}engine.args.{given} cannot be given, prl decides on {option}: {remedy}")
