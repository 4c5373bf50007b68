"""Reverse KL to a reference model as a policy gradient per token, or a divergence from it, differentiated itself.

On-policy distillation (`opd`, `opsd`), or a pull beside a policy gradient (`algo.kl`).
"""

from prl.config.trainer import RefKLConfig
from prl.losses.interface import LossInputs, TokenTerms, importance_weighted, mismatch_kl, select, weighted
from prl.losses.options import NoOptions, tokenwise


@tokenwise(RefKLConfig)
def ref_kl_loss(inputs: LossInputs, options: RefKLConfig) -> TokenTerms:
    """Policy gradient of the reverse KL: sum w * (-keep * stopgrad(k) * rho + kl_tau * (t - i)^2).

    Here k = ref - t and rho = exp(t - i).

    The score-function (policy-gradient) estimator of reverse KL: k, minus Schulman's k1 = log policy - log reference
    ("Approximating KL Divergence", 2020), takes the place of an advantage. On-policy, with kl_tau = 0 and no token
    masked, the expected gradient is exactly that of the sum over tokens of KL(policy || reference) given the tokens
    before, these taken as they were sampled. It is not that of the KL of whole sequences: what a token does to the KL
    of later ones is left out. Off-policy, rho corrects for the token, not for those before it. To differentiate k1
    itself would be no estimate at all: its expected gradient is zero.

    A token leaves the first term when exp(t) - exp(i) < -mask_low. The trust region is one-sided: a token whose
    probability rose is still pulled towards the reference, up or down. Advantages are never read.

    Metrics over members: `ref_kl` (mean k; its negative estimates the KL) and `ref_kl/is_masked`. Over dropped and
    over kept tokens: `ref_kl/masked_mismatch_kl` and `ref_kl/unmasked_mismatch_kl`.

    Raises ValueError without `ref_logprobs`.
    """
    if inputs.ref_logprobs is None:
        raise ValueError(
            "the ref_kl loss needs ref_logprobs, which this sequence lacks: only algorithms that score a reference "
            "model (opd, opsd) may put tokens in ref_kl"
        )
    members = inputs.members(sampler=True)
    t, i = select(members, inputs.trainer_logprobs), select(members, inputs.inference_logprobs)
    k = select(members, inputs.ref_logprobs) - t.detach()
    log_ratio = t - i
    dropped = members & (t.detach().exp() - i.exp() < -options.mask_low)
    keep = members & ~dropped

    policy = importance_weighted(k, log_ratio, keep)
    mismatch = mismatch_kl(log_ratio)
    return TokenTerms(
        loss=weighted(inputs, members, options.kl_tau * log_ratio.square() - policy),
        metrics={
            "ref_kl": (k, members),
            "ref_kl/is_masked": (dropped, members),
            "ref_kl/masked_mismatch_kl": (mismatch, dropped),
            "ref_kl/unmasked_mismatch_kl": (mismatch, keep),
        },
        excluded={"dropped": dropped},
    )


@tokenwise(NoOptions)
def divergence_loss(inputs: LossInputs, _: NoOptions) -> TokenTerms:
    """Divergence of the policy's next-token distributions from the reference's, D = `inputs.divergence`: sum w * D.

    D is `prl.trainer.divergence.divergence`: exact where the sampled token's k is an estimate, so its gradient has no
    noise of the token that was drawn. The tokens before are taken as they were sampled: no ratio to the sampler, no
    trust region. Source: GKD (arXiv 2306.13649), MiniLLM (arXiv 2306.08543).

    Metrics over members: `ref_kl/divergence` (mean D), and `ref_kl` (mean k = ref - t of the sampled token).
    """
    assert inputs.divergence is not None and inputs.ref_logprobs is not None  # the trainer computes it
    members = inputs.members(sampler=True)
    k = select(members, inputs.ref_logprobs) - select(members, inputs.trainer_logprobs.detach())
    value = select(members, inputs.divergence)
    return TokenTerms(
        loss=weighted(inputs, members, value),
        metrics={"ref_kl/divergence": (value.detach(), members), "ref_kl": (k, members)},
    )
