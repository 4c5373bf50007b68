"""The node `model.lora`."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le


@dataclass
class LoraConfig:
    """Train low-rank adapters (LoRA, arXiv 2106.09685) in place of the weights: W + alpha / rank * B A."""

    rank: Annotated[int, Ge(1), Le(1024)] | None = None
    """Rank of the adapters; null = the weights themselves are trained. LoRA wants about ten times their learning rate.
    """
    alpha: Annotated[float, Gt(0), Le(1e6)] = 32.0
    """Divided by the rank, it scales the adapters."""
    target_modules: list[str] | None = None
    """Linear layers that get an adapter, by the ends of their names, e.g. [q_proj,v_proj]; null = all but the output
    head."""
