"""The rl losses: policy gradients. Per token: r = exp(t - i), d = exp(t) - exp(i); with `proximal` p is in i's place.

Each is a function with its options in the class above it, which extends `PolicyOptions`. Another loss is another such
pair and a file in `conf/loss/`. Without advantages all of them raise `ValueError`. There is no torch at the top, so
that a config is checked without it: formulas use the methods of tensors.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Gt, Le, Lt

from prl.losses.options import AggMode, PolicyOptions, tokenwise

if TYPE_CHECKING:
    from torch import Tensor

    from prl.losses.interface import LossInputs, TokenTerms
    from prl.losses.policy import PolicyTokens


@dataclass(frozen=True)
class DefaultOptions(PolicyOptions):
    """DPPO-masked policy gradient with a squared-log-ratio regulariser."""

    dppo_mask_low: Annotated[float, Ge(0)] = 0.2
    """Drop tokens with A <= 0 whose probability fell by more than this since sampling."""
    dppo_mask_high: Annotated[float, Ge(0)] = 0.2
    """Drop tokens with A > 0 whose probability rose by more than this since sampling."""
    adv_tau: Annotated[float, Ge(-1e6), Le(1e6)] = 1.0
    """Scale of the policy-gradient term, for which gradients must stay finite; 0 = only the regulariser."""
    kl_tau: Annotated[float, Ge(0), Le(1e6)] = 1e-3
    """Scale of the regulariser."""
    delta: Annotated[float, Gt(0), Le(1e30)] | None = 8.0
    """Upper clamp of the importance ratio in the policy-gradient term, without gradient above it. Without it the ratio
    of a rare token with A <= 0 has no bound, because the mask does not drop it. null = none."""


@tokenwise(DefaultOptions)
def default_loss(inputs: "LossInputs", options: DefaultOptions) -> "TokenTerms":
    """DPPO's mask on the policy gradient, and Kimi K2.5's squared-log-ratio KL on every member.

    sum w * (-keep * adv_tau * A * r + kl_tau * (t - i)^2). A token leaves the first term, not the second, when its
    probability has already moved far enough in the direction of its advantage: (A > 0 and d > high) or (A <= 0 and
    d < -low). The measure is the change in probability, not PPO's ratio, which is too strict on rare tokens and too lax
    on common ones. With `delta`, r in the first term is min(r, delta), without gradient where it clips.

    Metrics over members: `is_masked`, `is_masked_low`, `is_masked_high` (shares), `unmasked_mismatch_kl` (over kept);
    over dropped tokens: `masked_mismatch_kl`, `masked_advantage_positive`, `masked_advantage_negative` (the shares with
    A > 0 and A <= 0, adding up to 1).
    """
    tokens = inputs.policy_tokens(options)
    positive = tokens.advantages > 0
    high = tokens.members & positive & (tokens.moved > options.dppo_mask_high)
    low = tokens.members & ~positive & (tokens.moved < -options.dppo_mask_low)
    return _masked(tokens, high, low, adv_tau=options.adv_tau, kl_tau=options.kl_tau, delta=options.delta)


@dataclass(frozen=True)
class IPOOptions(PolicyOptions):
    """Policy gradient without tokens whose probability moved far, whatever their advantage."""

    eps: Annotated[float, Ge(0)] = 0.3
    """Drop tokens whose probability changed by more than this since sampling."""
    kl_tau: Annotated[float, Ge(0), Le(1e6)] = 0.0
    """Scale of the squared-log-ratio regulariser, which also applies to dropped tokens."""
    delta: Annotated[float, Gt(0), Le(1e30)] | None = 8.0
    """Upper clamp of the importance ratio, as in the default loss. null = none."""


@tokenwise(IPOOptions)
def ipo_loss(inputs: "LossInputs", options: IPOOptions) -> "TokenTerms":
    """The default loss with a mask on both sides: a token leaves the first term when |d| > eps, whatever its advantage.

    sum w * (-keep * A * min(r, delta) + kl_tau * (t - i)^2). Metrics as of `default_loss`.
    """
    tokens = inputs.policy_tokens(options)
    high = tokens.moved > options.eps
    low = tokens.moved < -options.eps
    return _masked(tokens, high, low, adv_tau=1.0, kl_tau=options.kl_tau, delta=options.delta)


def _masked(
    tokens: "PolicyTokens", high: "Tensor", low: "Tensor", *, adv_tau: float, kl_tau: float, delta: float | None
) -> "TokenTerms":
    """A policy gradient without the tokens in `high` and `low`, and a regulariser with them."""
    dropped = high | low
    keep = tokens.members & ~dropped
    positive = tokens.advantages > 0
    # The scale goes onto the advantage: with 0 no ratio is computed, which may be infinite.
    policy = tokens.importance_weighted(adv_tau * tokens.advantages, tokens.log_ratio, keep, delta)
    excluded = {"dropped": dropped}
    if delta is not None:
        excluded["clipped"] = tokens.ratio > delta
    return tokens.terms(
        kl_tau * tokens.log_ratio.square() - policy,
        metrics={
            "masked_mismatch_kl": (tokens.mismatch, dropped),
            "unmasked_mismatch_kl": (tokens.mismatch, keep),
            "is_masked": (dropped, tokens.members),
            "is_masked_low": (low, tokens.members),
            "is_masked_high": (high, tokens.members),
            "masked_advantage_positive": (positive, dropped),
            "masked_advantage_negative": (~positive, dropped),
        },
        excluded=excluded,
    )


@dataclass(frozen=True)
class AIPOOptions(PolicyOptions):
    """Importance-weighted policy gradient with a one-sided clip (arXiv 2505.24034)."""

    delta: Annotated[float, Gt(0), Le(1e30)] = 8.0
    """Upper clamp of the importance ratio."""


@tokenwise(AIPOOptions)
def aipo_loss(inputs: "LossInputs", options: AIPOOptions) -> "TokenTerms":
    """AIPO (LlamaRL, arXiv 2505.24034): -sum w * min(r, delta) * A, one-sided clipping and no KL term.

    A clipped token has no gradient. Metrics over members: `importance_ratio`, `clipped_importance_ratio`, `is_clipped`
    (r > delta).
    """
    tokens = inputs.policy_tokens(options)
    policy = tokens.importance_weighted(tokens.advantages, tokens.log_ratio, tokens.members, options.delta)
    clipped = tokens.ratio > options.delta
    return tokens.terms(
        -policy,
        metrics={
            "importance_ratio": (tokens.ratio, tokens.members),
            "clipped_importance_ratio": (tokens.ratio.clamp_max(options.delta), tokens.members),
            "is_clipped": (clipped, tokens.members),
        },
        excluded={"clipped": clipped},
    )


@dataclass(frozen=True)
class PPOOptions(PolicyOptions):
    """PPO's clipped policy gradient (arXiv 1707.06347), with clip-higher and dual clip."""

    clip_low: Annotated[float, Ge(0), Le(1)] = 0.2
    """PPO clip for A < 0: a token has no gradient if its ratio is below 1 minus this."""
    clip_high: Annotated[float, Ge(0), Le(1e30)] = 0.2
    """PPO clip for A > 0: no gradient for a token whose ratio is above 1 plus this; 0.28 in DAPO (arXiv 2503.14476)."""
    dual_clip: Annotated[float, Gt(1), Le(1e30)] | None = None
    """A token with A < 0 has no gradient if its ratio is above this, e.g. 3 (arXiv 1912.09729). null = none."""


@tokenwise(PPOOptions)
def ppo_loss(inputs: "LossInputs", options: PPOOptions) -> "TokenTerms":
    """PPO (arXiv 1707.06347): -sum w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A).

    A larger `clip_high` is DAPO's clip-higher (arXiv 2503.14476). With `dual_clip` c, a token with A < 0 has a loss of
    at most -c * A (arXiv 1912.09729). A clipped token has no gradient.

    Metrics over members: `importance_ratio`, `is_clipped`.
    """
    tokens = inputs.policy_tokens(options)
    policy, clipped = _clipped(tokens, tokens.log_ratio, options.clip_low, options.clip_high, options.dual_clip)
    return tokens.terms(
        -policy,
        metrics={"importance_ratio": (tokens.ratio, tokens.members), "is_clipped": (clipped, tokens.members)},
        excluded={"clipped": clipped},
    )


@dataclass(frozen=True)
class GSPOOptions(PolicyOptions):
    """Policy gradient with one clipped importance ratio for each sequence (arXiv 2507.18071).

    The defaults are the paper's, for long completions; of short ones, more are clipped.
    """

    clip_ratio_low: Annotated[float, Ge(0), Lt(1)] = 3e-4
    """A sequence with A < 0 has no gradient if its ratio is below 1 minus this."""
    clip_ratio_high: Annotated[float, Ge(0), Le(1e30)] = 4e-4
    """A sequence with A > 0 has no gradient if its ratio is above 1 plus this."""
    agg_mode: AggMode = "sequence_mean"
    """As in the other losses."""


@tokenwise(GSPOOptions)
def gspo_loss(inputs: "LossInputs", options: GSPOOptions) -> "TokenTerms":
    """GSPO (arXiv 2507.18071) in its form for advantages of tokens, GSPO-token (equations 13 and 14).

    -sum w * min(s * A, clip(s, 1 - low, 1 + high) * A), where s = exp(mean of t - i over the members of the sequence)
    is the importance ratio of the sequence (equation 7), and its gradient at a token that of s * t (the paper's
    sg[s] * exp(t) / sg[exp(t)]). With one advantage for the whole sequence it is GSPO itself (equation 5). A sequence
    is a sample: a rollout whose history was edited has several, each with its ratio. `agg_mode` is `sequence_mean`.

    Metrics over members: `sequence_ratio` (s), `is_clipped` (A > 0 and s > 1 + high, or A < 0 and s < 1 - low).
    """
    tokens = inputs.policy_tokens(options)
    log_ratio = tokens.sequence_mean(tokens.log_ratio)
    # Its value is that of the sequence, its gradient that of the token's own logprob.
    with_gradient = log_ratio + tokens.logprobs - tokens.logprobs.detach()
    policy, clipped = _clipped(tokens, with_gradient, options.clip_ratio_low, options.clip_ratio_high)
    return tokens.terms(
        -policy,
        metrics={"sequence_ratio": (log_ratio.exp(), tokens.members), "is_clipped": (clipped, tokens.members)},
        excluded={"clipped": clipped},
    )


def _clipped(
    tokens: "PolicyTokens", log_ratio: "Tensor", clip_low: float, clip_high: float, dual_clip: float | None = None
) -> "tuple[Tensor, Tensor]":
    """PPO's clipped objective of each token, min(r * A, clip(r) * A), and as bool the tokens that were clipped."""
    advantages, ratio = tokens.advantages, log_ratio.detach().exp()
    high = tokens.members & (advantages > 0) & (ratio > 1 + clip_high)
    low = tokens.members & (advantages < 0) & (ratio < 1 - clip_low)
    dual = tokens.members & (advantages < 0) & (ratio > (math.inf if dual_clip is None else dual_clip))
    clipped = high | low | dual
    # Where r is clipped the objective is a constant: such tokens are left out of the term with a gradient.
    policy = tokens.importance_weighted(advantages, log_ratio, tokens.members & ~clipped)
    policy = policy.where(~high, (1 + clip_high) * advantages)
    policy = policy.where(~low, (1 - clip_low) * advantages)
    if dual_clip is not None:
        policy = policy.where(~dual, dual_clip * advantages)
    return policy, clipped


@dataclass(frozen=True)
class CISPOOptions(PolicyOptions):
    """Policy gradient weighted by a clipped ratio; clipped tokens keep their gradient (arXiv 2506.13585)."""

    clip_high: Annotated[float, Ge(1), Le(1e30)] = 5.0
    """Largest weight (an upper bound of the ratio itself)."""
    clip_low: Annotated[float, Ge(0), Le(1)] | None = None
    """Smallest weight. null = none."""


@tokenwise(CISPOOptions)
def cispo_loss(inputs: "LossInputs", options: CISPOOptions) -> "TokenTerms":
    """CISPO (MiniMax-M1, arXiv 2506.13585): -sum w * stopgrad(clip(r, clip_low, clip_high)) * A * t.

    The bounds are those of r itself. A clipped token keeps its gradient, unlike in PPO. Metrics over members:
    `importance_ratio`, `is_clipped`.
    """
    tokens = inputs.policy_tokens(options)
    # A weight without a gradient: that is why a clipped token keeps the one of its logprob.
    clipped = tokens.ratio.clamp(options.clip_low, options.clip_high)
    return tokens.terms(
        -clipped * tokens.advantages * tokens.logprobs,
        metrics={
            "importance_ratio": (tokens.ratio, tokens.members),
            "is_clipped": (clipped != tokens.ratio, tokens.members),
        },
    )


@dataclass(frozen=True)
class ReinforceOptions(PolicyOptions):
    """REINFORCE, without a ratio; correction=tis makes it truncated importance sampling."""

    has_ratio = False


@tokenwise(ReinforceOptions)
def reinforce_loss(inputs: "LossInputs", options: ReinforceOptions) -> "TokenTerms":
    """REINFORCE (Williams, 1992): -sum w * A * t, without a ratio to the sampler; `correction=tis` may bring one.

    Metric over members: `importance_ratio`.
    """
    tokens = inputs.policy_tokens(options)
    return tokens.terms(
        -tokens.advantages * tokens.logprobs, metrics={"importance_ratio": (tokens.ratio, tokens.members)}
    )
