"""Cross-entropy on given tokens: the samples of a frozen model (`sft`), the observations of an env (`echo`)."""

from prl.losses.interface import LossInputs, TokenTerms, select, weighted
from prl.losses.options import NoOptions, tokenwise


@tokenwise(NoOptions)
def ce_loss(inputs: LossInputs, _: NoOptions) -> TokenTerms:
    """Cross-entropy: sum w * -t, without sampler logprobs or advantages. Metric `nll`: the unweighted mean of -t."""
    members = inputs.members(sampler=False)
    nll = -select(members, inputs.trainer_logprobs)
    return TokenTerms(loss=weighted(inputs, members, nll), metrics={"nll": (nll.detach(), members)})
