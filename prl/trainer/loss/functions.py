"""The loss functions of the components. Per token: rho = exp(t - i), d = exp(t) - exp(i).

- `rl`: `default_loss`, `aipo_loss` and `gspo_loss`, policy gradients. `entropy_coef`, `agg_mode` and `constant_length`
  are explained at `prl.trainer.loss.interface.reduced`.
- `ce`: cross-entropy on given tokens: the samples of a frozen model (`sft`), the observations of an env (`echo`).
- `ref_kl`: reverse KL to a reference model as a per-token policy gradient: on-policy distillation (`opd`, `opsd`), or
  beside a policy gradient (`algo.kl`).
"""

import torch

from prl.trainer.loss.interface import (
    LossInputs,
    TokenTerms,
    importance_weighted,
    mismatch_kl,
    reduced,
    select,
    tokenwise,
    weighted,
)


@tokenwise
def default_loss(
    inputs: LossInputs,
    *,
    dppo_mask_low: float = 0.2,
    dppo_mask_high: float = 0.2,
    adv_tau: float = 1.0,
    kl_tau: float = 1e-3,
    delta: float | None = 8.0,
    entropy_coef: float = 0.0,
    agg_mode: str = "token_mean",
    constant_length: int | None = None,
) -> TokenTerms:
    """DPPO's mask on the policy gradient, and Kimi K2.5's squared-log-ratio KL on every member.

    sum w * (-keep * adv_tau * A * rho + kl_tau * (t - i)^2). A token leaves the first term, not the second, when its
    probability has already moved far enough in the direction of its advantage: (A > 0 and d > high) or (A <= 0 and
    d < -low). The measure is the change in probability, not PPO's ratio, which is too strict on rare tokens and too lax
    on common ones. With `delta`, rho in the first term is min(rho, delta), without gradient where it clips.

    Metrics over members: `is_masked`, `is_masked_low`, `is_masked_high` (shares), `unmasked_mismatch_kl` (over kept);
    over dropped tokens: `masked_mismatch_kl`, `masked_advantage_positive`, `masked_advantage_negative` (the shares with
    A > 0 and A <= 0, adding up to 1). Raises `ValueError` without advantages.
    """
    members = inputs.members(sampler=True)
    t, i = select(members, inputs.trainer_logprobs), select(members, inputs.inference_logprobs)
    advantages = select(members, _advantages(inputs))
    log_ratio = t - i

    moved = t.detach().exp() - i.exp()
    positive = advantages > 0
    high = members & positive & (moved > dppo_mask_high)
    low = members & ~positive & (moved < -dppo_mask_low)
    dropped = high | low
    keep = members & ~dropped

    policy = importance_weighted(adv_tau * advantages, log_ratio, keep, delta)
    mismatch = mismatch_kl(log_ratio)
    return TokenTerms(
        loss=reduced(inputs, members, kl_tau * log_ratio.square() - policy, entropy_coef, agg_mode, constant_length),
        metrics={
            "masked_mismatch_kl": (mismatch, dropped),
            "unmasked_mismatch_kl": (mismatch, keep),
            "is_masked": (dropped, members),
            "is_masked_low": (low, members),
            "is_masked_high": (high, members),
            "masked_advantage_positive": (positive, dropped),
            "masked_advantage_negative": (~positive, dropped),
        },
        excluded={"dropped": dropped} | ({} if delta is None else {"clipped": log_ratio.detach().exp() > delta}),
    )


@tokenwise
def aipo_loss(
    inputs: LossInputs,
    *,
    delta: float = 8.0,
    entropy_coef: float = 0.0,
    agg_mode: str = "token_mean",
    constant_length: int | None = None,
) -> TokenTerms:
    """AIPO (LlamaRL, arXiv 2505.24034): -sum w * min(rho, delta) * A, one-sided clipping and no KL term.

    A clipped token has no gradient. Metrics over members: `importance_ratio`, `clipped_importance_ratio`, `is_clipped`
    (rho > delta). Raises `ValueError` without advantages.
    """
    members = inputs.members(sampler=True)
    t, i = select(members, inputs.trainer_logprobs), select(members, inputs.inference_logprobs)
    log_ratio = t - i
    policy = importance_weighted(select(members, _advantages(inputs)), log_ratio, members, delta)
    ratio = log_ratio.detach().exp()
    clipped = ratio > delta
    return TokenTerms(
        loss=reduced(inputs, members, -policy, entropy_coef, agg_mode, constant_length),
        metrics={
            "importance_ratio": (ratio, members),
            "clipped_importance_ratio": (ratio.clamp_max(delta), members),
            "is_clipped": (clipped, members),
        },
        excluded={"clipped": clipped},
    )


@tokenwise
def gspo_loss(
    inputs: LossInputs,
    *,
    clip_ratio_low: float = 3e-4,
    clip_ratio_high: float = 4e-4,
    entropy_coef: float = 0.0,
    agg_mode: str = "sequence_mean",
    constant_length: int | None = None,
) -> TokenTerms:
    """GSPO (arXiv 2507.18071) in its form for advantages of tokens, GSPO-token (equations 13 and 14).

    -sum w * min(s * A, clip(s, 1 - low, 1 + high) * A), where s = exp(mean of t - i over the members of the sequence)
    is the importance ratio of the sequence (equation 7), and its gradient at a token that of s * t (the paper's
    sg[s] * exp(t) / sg[exp(t)]). With one advantage for the whole sequence it is GSPO itself (equation 5). A sequence
    is a sample: a rollout whose history broke has several, each with a ratio of its own.

    Metrics over members: `sequence_ratio` (s), `is_clipped` (A > 0 and s > 1 + high, or A < 0 and s < 1 - low). Raises
    `ValueError` without advantages.
    """
    members = inputs.members(sampler=True)
    t, i = select(members, inputs.trainer_logprobs), select(members, inputs.inference_logprobs)
    advantages = select(members, _advantages(inputs))
    size = inputs.sequence_sum(members.to(t.dtype)).clamp_min(1)
    log_ratio = inputs.sequence_sum((t - i).detach()) / size
    ratio = log_ratio.exp()
    high = members & (advantages > 0) & (ratio > 1 + clip_ratio_high)
    low = members & (advantages < 0) & (ratio < 1 - clip_ratio_low)
    clipped = high | low

    policy = importance_weighted(advantages, log_ratio + t - t.detach(), members & ~clipped)
    policy = torch.where(high, (1 + clip_ratio_high) * advantages, policy)
    policy = torch.where(low, (1 - clip_ratio_low) * advantages, policy)
    return TokenTerms(
        loss=reduced(inputs, members, -policy, entropy_coef, agg_mode, constant_length),
        metrics={"sequence_ratio": (ratio, members), "is_clipped": (clipped, members)},
        excluded={"clipped": clipped},
    )


@tokenwise
def ce_loss(inputs: LossInputs) -> TokenTerms:
    """sum w * -t. Reads neither the sampler's logprobs nor advantages. Metric `nll`: the unweighted mean of -t."""
    members = inputs.members(sampler=False)
    nll = -select(members, inputs.trainer_logprobs)
    return TokenTerms(loss=weighted(inputs, members, nll), metrics={"nll": (nll.detach(), members)})


@tokenwise
def ref_kl_loss(inputs: LossInputs, *, mask_low: float = 0.2, kl_tau: float = 1e-3) -> TokenTerms:
    """sum w * (-keep * stopgrad(k) * rho + kl_tau * (t - i)^2), with k = ref - t, rho = exp(t - i).

    The score-function (policy-gradient) estimator of reverse KL: k, minus Schulman's k1 = log policy - log reference
    ("Approximating KL Divergence", 2020), takes the place of an advantage. On-policy, with kl_tau = 0 and no token
    masked, the expected gradient is exactly that of the sum over tokens of KL(policy || reference) given the tokens
    before, these taken as they were sampled. It is not that of the KL of whole sequences: what a token does to the KL
    of later ones is left out. Off-policy, rho corrects for the token, not for those before it. To differentiate k1
    itself would be no estimate at all: its expected gradient is zero.

    A token leaves the first term when exp(t) - exp(i) < -mask_low. The trust region is one-sided: a token whose
    probability rose is still pulled towards the reference, up or down. Advantages are never read.

    Metrics over members: `ref_kl` (mean k; its negative estimates the KL), `ref_kl/is_masked`; and `ref_kl/
    masked_mismatch_kl`, `ref_kl/unmasked_mismatch_kl` over dropped and kept tokens. Raises `ValueError` without
    `ref_logprobs`.
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
    dropped = members & (t.detach().exp() - i.exp() < -mask_low)
    keep = members & ~dropped

    policy = importance_weighted(k, log_ratio, keep)
    mismatch = mismatch_kl(log_ratio)
    return TokenTerms(
        loss=weighted(inputs, members, kl_tau * log_ratio.square() - policy),
        metrics={
            "ref_kl": (k, members),
            "ref_kl/is_masked": (dropped, members),
            "ref_kl/masked_mismatch_kl": (mismatch, dropped),
            "ref_kl/unmasked_mismatch_kl": (mismatch, keep),
        },
        excluded={"dropped": dropped},
    )


def _advantages(inputs: LossInputs) -> torch.Tensor:
    if inputs.advantages is None:
        raise ValueError("the rl loss needs advantages, but this sequence has none")
    return inputs.advantages
