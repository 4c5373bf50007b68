"""The rl losses: policy gradients. Per token: r = exp(t - i), d = exp(t) - exp(i); with `proximal` p is in i's place.

Each takes the options of `PolicyTokens` as well: `entropy_coef`, `agg_mode`, `constant_length`, `proximal` and
`correction`. Another loss is a function like these, with its options in `prl/config/trainer.py`. They raise
`ValueError` without advantages.
"""

import math
from typing import Any

import torch
from torch import Tensor

from prl.losses.interface import LossInputs, TokenTerms, importance_weighted, mismatch_kl, tokenwise
from prl.losses.policy import PolicyTokens


@tokenwise
def default_loss(
    inputs: LossInputs,
    *,
    dppo_mask_low: float = 0.2,
    dppo_mask_high: float = 0.2,
    adv_tau: float = 1.0,
    kl_tau: float = 1e-3,
    delta: float | None = 8.0,
    **common: Any,
) -> TokenTerms:
    """DPPO's mask on the policy gradient, and Kimi K2.5's squared-log-ratio KL on every member.

    sum w * (-keep * adv_tau * A * r + kl_tau * (t - i)^2). A token leaves the first term, not the second, when its
    probability has already moved far enough in the direction of its advantage: (A > 0 and d > high) or (A <= 0 and
    d < -low). The measure is the change in probability, not PPO's ratio, which is too strict on rare tokens and too lax
    on common ones. With `delta`, r in the first term is min(r, delta), without gradient where it clips.

    Metrics over members: `is_masked`, `is_masked_low`, `is_masked_high` (shares), `unmasked_mismatch_kl` (over kept);
    over dropped tokens: `masked_mismatch_kl`, `masked_advantage_positive`, `masked_advantage_negative` (the shares with
    A > 0 and A <= 0, adding up to 1).
    """
    tokens = PolicyTokens(inputs, **common)
    moved = tokens.logprobs.detach().exp() - tokens.old.exp()
    positive = tokens.advantages > 0
    high = tokens.members & positive & (moved > dppo_mask_high)
    low = tokens.members & ~positive & (moved < -dppo_mask_low)
    return _masked(tokens, high, low, adv_tau=adv_tau, kl_tau=kl_tau, delta=delta)


@tokenwise
def ipo_loss(
    inputs: LossInputs, *, eps: float = 0.3, kl_tau: float = 0.0, delta: float | None = 8.0, **common: Any
) -> TokenTerms:
    """The default loss with a mask on both sides: a token leaves the first term when |d| > eps, whatever its advantage.

    sum w * (-keep * A * min(r, delta) + kl_tau * (t - i)^2). Metrics as of `default_loss`.
    """
    tokens = PolicyTokens(inputs, **common)
    moved = tokens.logprobs.detach().exp() - tokens.old.exp()
    return _masked(tokens, moved > eps, moved < -eps, adv_tau=1.0, kl_tau=kl_tau, delta=delta)


def _masked(
    tokens: PolicyTokens, high: Tensor, low: Tensor, *, adv_tau: float, kl_tau: float, delta: float | None
) -> TokenTerms:
    """A policy gradient without the tokens in `high` and `low`, and a regulariser with them."""
    dropped = high | low
    keep = tokens.members & ~dropped
    positive = tokens.advantages > 0
    policy = importance_weighted(adv_tau * tokens.advantages, tokens.log_ratio, keep, delta)
    mismatch = mismatch_kl(tokens.log_ratio)
    return tokens.terms(
        kl_tau * tokens.log_ratio.square() - policy,
        metrics={
            "masked_mismatch_kl": (mismatch, dropped),
            "unmasked_mismatch_kl": (mismatch, keep),
            "is_masked": (dropped, tokens.members),
            "is_masked_low": (low, tokens.members),
            "is_masked_high": (high, tokens.members),
            "masked_advantage_positive": (positive, dropped),
            "masked_advantage_negative": (~positive, dropped),
        },
        excluded={"dropped": dropped} | ({} if delta is None else {"clipped": tokens.ratio > delta}),
    )


@tokenwise
def aipo_loss(inputs: LossInputs, *, delta: float = 8.0, **common: Any) -> TokenTerms:
    """AIPO (LlamaRL, arXiv 2505.24034): -sum w * min(r, delta) * A, one-sided clipping and no KL term.

    A clipped token has no gradient. Metrics over members: `importance_ratio`, `clipped_importance_ratio`, `is_clipped`
    (r > delta).
    """
    tokens = PolicyTokens(inputs, **common)
    policy = importance_weighted(tokens.advantages, tokens.log_ratio, tokens.members, delta)
    clipped = tokens.ratio > delta
    return tokens.terms(
        -policy,
        metrics={
            "importance_ratio": (tokens.ratio, tokens.members),
            "clipped_importance_ratio": (tokens.ratio.clamp_max(delta), tokens.members),
            "is_clipped": (clipped, tokens.members),
        },
        excluded={"clipped": clipped},
    )


@tokenwise
def ppo_loss(
    inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None, **common: Any
) -> TokenTerms:
    """PPO (arXiv 1707.06347): -sum w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A).

    A larger `clip_high` is DAPO's clip-higher (arXiv 2503.14476). With `dual_clip` c, a token with A < 0 has a loss of
    at most -c * A (arXiv 1912.09729). A clipped token has no gradient. Metrics over members: `importance_ratio`,
    `is_clipped`.
    """
    tokens = PolicyTokens(inputs, **common)
    policy, clipped = _clipped(tokens, tokens.log_ratio, clip_low, clip_high, dual_clip)
    return tokens.terms(
        -policy,
        metrics={"importance_ratio": (tokens.ratio, tokens.members), "is_clipped": (clipped, tokens.members)},
        excluded={"clipped": clipped},
    )


@tokenwise
def gspo_loss(
    inputs: LossInputs, *, clip_ratio_low: float = 3e-4, clip_ratio_high: float = 4e-4, **common: Any
) -> TokenTerms:
    """GSPO (arXiv 2507.18071) in its form for advantages of tokens, GSPO-token (equations 13 and 14).

    -sum w * min(s * A, clip(s, 1 - low, 1 + high) * A), where s = exp(mean of t - i over the members of the sequence)
    is the importance ratio of the sequence (equation 7), and its gradient at a token that of s * t (the paper's
    sg[s] * exp(t) / sg[exp(t)]). With one advantage for the whole sequence it is GSPO itself (equation 5). A sequence
    is a sample: a rollout whose history was edited has several, each with its ratio. `agg_mode` is `sequence_mean`.

    Metrics over members: `sequence_ratio` (s), `is_clipped` (A > 0 and s > 1 + high, or A < 0 and s < 1 - low).
    """
    tokens = PolicyTokens(inputs, **{"agg_mode": "sequence_mean"} | common)
    log_ratio = tokens.sequence_mean(tokens.log_ratio)
    with_gradient = log_ratio + tokens.logprobs - tokens.logprobs.detach()
    policy, clipped = _clipped(tokens, with_gradient, clip_ratio_low, clip_ratio_high)
    return tokens.terms(
        -policy,
        metrics={"sequence_ratio": (log_ratio.exp(), tokens.members), "is_clipped": (clipped, tokens.members)},
        excluded={"clipped": clipped},
    )


def _clipped(
    tokens: PolicyTokens, log_ratio: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """PPO's clipped objective of each token, min(r * A, clip(r) * A), and which tokens were clipped."""
    advantages, ratio = tokens.advantages, log_ratio.detach().exp()
    high = tokens.members & (advantages > 0) & (ratio > 1 + clip_high)
    low = tokens.members & (advantages < 0) & (ratio < 1 - clip_low)
    dual = tokens.members & (advantages < 0) & (ratio > (math.inf if dual_clip is None else dual_clip))
    clipped = high | low | dual
    policy = importance_weighted(advantages, log_ratio, tokens.members & ~clipped)
    policy = torch.where(high, (1 + clip_high) * advantages, policy)
    policy = torch.where(low, (1 - clip_low) * advantages, policy)
    return policy if dual_clip is None else torch.where(dual, dual_clip * advantages, policy), clipped


@tokenwise
def cispo_loss(
    inputs: LossInputs, *, clip_high: float = 5.0, clip_low: float | None = None, **common: Any
) -> TokenTerms:
    """CISPO (MiniMax-M1, arXiv 2506.13585): -sum w * stopgrad(clip(r, clip_low, clip_high)) * A * t.

    The bounds are those of r itself. A clipped token keeps its gradient, unlike in PPO. Metrics over members:
    `importance_ratio`, `is_clipped`.
    """
    tokens = PolicyTokens(inputs, **common)
    clipped = tokens.ratio.clamp(clip_low, clip_high)
    return tokens.terms(
        -clipped * tokens.advantages * tokens.logprobs,
        metrics={
            "importance_ratio": (tokens.ratio, tokens.members),
            "is_clipped": (clipped != tokens.ratio, tokens.members),
        },
    )


@tokenwise
def reinforce_loss(inputs: LossInputs, **common: Any) -> TokenTerms:
    """REINFORCE (Williams, 1992): -sum w * A * t, without a ratio to the sampler; `correction=tis` may bring one.

    Metric over members: `importance_ratio`.
    """
    tokens = PolicyTokens(inputs, has_ratio=False, **common)
    return tokens.terms(
        -tokens.advantages * tokens.logprobs, metrics={"importance_ratio": (tokens.ratio, tokens.members)}
    )
