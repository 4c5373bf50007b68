"""The rl losses: policy gradients. Per token: rho = exp(t - i), d = exp(t) - exp(i).

`default_loss`, `aipo_loss` and `gspo_loss` take `entropy_coef`, `agg_mode` and `constant_length`, which `reduced`
explains. Another one is a function like these and its node in `prl/trainer/config.py`.
"""

import torch
from torch import Tensor

from prl.losses.interface import LossInputs, TokenTerms, importance_weighted, mismatch_kl, select, tokenwise, weighted


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
    advantages = select(members, advantages_of(inputs))
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
    policy = importance_weighted(select(members, advantages_of(inputs)), log_ratio, members, delta)
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
    advantages = select(members, advantages_of(inputs))
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


def reduced(
    inputs: LossInputs,
    members: Tensor,
    loss: Tensor,
    entropy_coef: float,
    agg_mode: str,
    constant_length: int | None,
) -> Tensor:
    """What an rl loss is, `[tokens]`: `loss`, minus `entropy_coef` times the entropy, weighted and normalised.

    With N member tokens in S sequences over the whole step, all envs and ranks, and n of them in one sequence, the rl
    term of L becomes, by `agg_mode`:

    - `token_mean`: the sum over tokens / N. Source: DAPO (arXiv 2503.14476).
    - `sequence_mean`: the sum over sequences of (the sum over its tokens / n), / S. Source: GRPO (arXiv 2402.03300).
    - `constant`: the sum over tokens / (`constant_length` * S). Source: Dr. GRPO (arXiv 2503.20783).

    N and S count the tokens and sequences of all rl losses of the step, whatever their `agg_mode`. So each sequence
    counts as if the whole step had its mode, and envs with different modes do not change each other's gradient.

    Raises ValueError for another mode, for `constant` without its length, and for an entropy that is not there.
    """
    if entropy_coef:
        if inputs.entropy is None:
            raise ValueError("entropy_coef: these LossInputs have no entropy")
        loss = loss - entropy_coef * select(members, inputs.entropy)
    loss = weighted(inputs, members, loss)
    if agg_mode == "token_mean":
        return loss
    if agg_mode == "sequence_mean":
        return loss * (inputs.mean_length / inputs.sequence_sum(members.to(loss.dtype)).clamp_min(1))
    if agg_mode != "constant" or constant_length is None:
        raise ValueError(f"agg_mode={agg_mode!r} with constant_length={constant_length}: only constant needs a length")
    return loss * (inputs.mean_length / constant_length)


def advantages_of(inputs: LossInputs) -> Tensor:
    """The advantages. Raises ValueError where the sequence has none."""
    if inputs.advantages is None:
        raise ValueError("the rl loss needs advantages, but this sequence has none")
    return inputs.advantages
