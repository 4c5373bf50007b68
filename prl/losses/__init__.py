"""The loss: a sum of components (`rl`, `ce`, `ref_kl`), each a sum over its tokens divided by their number.

Start with `rl.py` (formulas) and `interface.py` (what a loss of your own gets).
"""

from prl.losses.ce import ce_loss
from prl.losses.compute import LossCounts, TokenTreatment, compute_loss, count_members
from prl.losses.interface import LossInputs, LossOutputs
from prl.losses.ref_kl import divergence_loss, ref_kl_loss
from prl.losses.rl import aipo_loss, cispo_loss, default_loss, gspo_loss, ipo_loss, ppo_loss, reinforce_loss

__all__ = [
    "LossCounts",
    "LossInputs",
    "LossOutputs",
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
]
