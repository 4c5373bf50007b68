"""The loss: a sum of components (`rl`, `ce`, `ref_kl`), each a sum over its tokens divided by their number.

Start with `rl.py` (formulas and options) and `interface.py` (the inputs that a loss of your own gets).
"""

import importlib
from typing import TYPE_CHECKING, Any

from prl.losses.options import NoOptions, PolicyOptions, tokenwise
from prl.losses.rl import aipo_loss, cispo_loss, default_loss, gspo_loss, ipo_loss, ppo_loss, reinforce_loss

if TYPE_CHECKING:
    from prl.losses.ce import ce_loss
    from prl.losses.compute import LossCounts, TokenTreatment, compute_loss, count_members
    from prl.losses.interface import LossInputs, LossOutputs
    from prl.losses.ref_kl import divergence_loss, ref_kl_loss

WITH_TORCH = {
    **dict.fromkeys(("LossCounts", "TokenTreatment", "compute_loss", "count_members"), "compute"),
    **dict.fromkeys(("LossInputs", "LossOutputs"), "interface"),
    **dict.fromkeys(("divergence_loss", "ref_kl_loss"), "ref_kl"),
    "ce_loss": "ce",
}
"""Modules of the names that `__getattr__` imports as they are asked for."""
__all__ = [
    "LossCounts",
    "LossInputs",
    "LossOutputs",
    "NoOptions",
    "PolicyOptions",
    "TokenTreatment",
    "aipo_loss",
    "ce_loss",
    "cispo_loss",
    "compute_loss",
    "count_members",
    "default_loss",
    "divergence_loss",
    "gspo_loss",
    "ipo_loss",
    "ppo_loss",
    "ref_kl_loss",
    "reinforce_loss",
    "tokenwise",
]


def __getattr__(name: str) -> Any:
    """Import a name whose module loads torch, which composing a config must not: it takes seconds."""
    if name not in WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{WITH_TORCH[name]}"), name)
