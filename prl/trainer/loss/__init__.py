"""The loss: a sum of components (`rl`, `ce`, `ref_kl`), each a sum over its member tokens divided by their count."""

from prl.trainer.loss.compute import TokenFates, compute_loss
from prl.trainer.loss.functions import aipo_loss, ce_loss, default_loss, ref_kl_loss
from prl.trainer.loss.members import LossCounts, count_members
from prl.trainer.loss.types import LossInputs, LossOutputs

__all__ = [
    "LossCounts",
    "LossInputs",
    "LossOutputs",
    "TokenFates",
    "aipo_loss",
    "ce_loss",
    "compute_loss",
    "count_members",
    "default_loss",
    "ref_kl_loss",
]
