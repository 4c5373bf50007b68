"""Config of what one sees of a run."""

from dataclasses import dataclass


@dataclass
class MonitorConfig:
    """Console and Weights & Biases. `metrics.jsonl` and the rollout files are always written."""

    console: str = "auto"
    """live (a table that updates), plain (a line a step), quiet, or auto: live on a terminal, else quiet."""
    wandb: str = "disabled"
    """disabled, offline (files under the run directory) or online."""
    wandb_project: str = "prl"
    token_export: bool = False
    """Write each shipped sequence, token by token, with logprobs, streams and fates, to `tokens/*/rank_*.jsonl`."""
