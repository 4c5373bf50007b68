"""The policy-gradient losses of the `rl` component. Per token: rho = exp(t - i), d = exp(t) - exp(i)."""

import torch

from prl.trainer.loss.types import (
    LossInputs,
    TokenTerms,
    importance_weighted,
    is_clipped,
    mismatch_kl,
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
    delta: float | None = None,
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
        loss=weighted(inputs, members, kl_tau * log_ratio.square() - policy),
        metrics={
            "masked_mismatch_kl": (mismatch, dropped),
            "unmasked_mismatch_kl": (mismatch, keep),
            "is_masked": (dropped, members),
            "is_masked_low": (low, members),
            "is_masked_high": (high, members),
            "masked_advantage_positive": (positive, dropped),
            "masked_advantage_negative": (~positive, dropped),
        },
        excluded={"dropped": dropped} | ({} if delta is None else {"clipped": is_clipped(log_ratio, delta)}),
    )


@tokenwise
def aipo_loss(inputs: LossInputs, *, delta: float = 8.0) -> TokenTerms:
    """AIPO (LlamaRL, arXiv 2505.24034): -sum w * min(rho, delta) * A, one-sided clipping and no entropy or KL term.

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
        loss=weighted(inputs, members, -policy),
        metrics={
            "importance_ratio": (ratio, members),
            "clipped_importance_ratio": (ratio.clamp_max(delta), members),
            "is_clipped": (clipped, members),
        },
        excluded={"clipped": clipped},
    )


def _advantages(inputs: LossInputs) -> torch.Tensor:
    if inputs.advantages is None:
        raise ValueError("the rl loss needs advantages, but this sequence has none")
    return inputs.advantages
