"""The loss: a sum of components (`rl`, `ce`, `ref_kl`), each a sum over its member tokens divided by their count."""

from prl.trainer.loss.ce import ce_loss
from prl.trainer.loss.compute import LossCounts, TokenTreatment, compute_loss, count_members, count_sequences
from prl.trainer.loss.interface import LossInputs, LossOutputs
from prl.trainer.loss.ref_kl import ref_kl_loss
from prl.trainer.loss.rl import aipo_loss, default_loss, gspo_loss

__all__ = [
    "LossCounts",
    "LossInputs",
    "LossOutputs",
    "TokenTreatment",
    "aipo_loss",
    "ce_loss",
    "compute_loss",
    "count_members",
    "count_sequences",
    "default_loss",
    "gspo_loss",
    "ref_kl_loss",
]
