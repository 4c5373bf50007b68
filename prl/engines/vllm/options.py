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
TOOL_PARSERS = {
    "deepseek": "deepseek_v3", "deepseek-v4": "deepseek_v4", "gemma4": "gemma4", "glm-4.5": "glm45", "glm-5": "glm47",
    "gpt-oss": "openai", "hy3": "hy_v3", "inkling": "inkling", "kimi-k2": "kimi_k2", "laguna": "poolside_v1",
    "llama-3": "llama3_json", "minimax-m2": "minimax_m2", "nemotron": "qwen3_coder", "prime-qwen3": "hermes",
    "qwen3": "hermes", "qwen3.": "qwen3_coder",
}  # fmt: skip
"""vLLM's parsers of tool calls, by the beginnings of the names of renderers."""


def with_tool_parser(args: Mapping[str, Any], renderer: str | None) -> dict[str, Any]:
    """Options with which replies have tool calls; a parser that they name stays. Raises ConfigError without any."""
    own = {str(name).replace("_", "-"): value for name, value in args.items()}
    families = [family for family in TOOL_PARSERS if (renderer or "").startswith(family)]
    if families:
        own = {"tool-call-parser": TOOL_PARSERS[max(families, key=len)]} | own
    if "tool-call-parser" not in own:
        family = (
            f"no tool parser is known for model.renderer={renderer}" if renderer else "the model's family is unknown"
        )
        raise ConfigError(
            f"tools=true: {family}: give model.renderer=qwen3 or the like, or +engine.args.tool-call-parser=…"
        )
    return {"enable-auto-tool-choice": True} | own


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
