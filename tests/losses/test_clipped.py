"""ppo, cispo, ipo and reinforce, and corrections, against float64 loops over their formulas, and at their edges."""

import functools
import math

import pytest
import torch
from loss_cases import inputs, mean, members_of, random_streams, run

from prl.losses import (
    LossCounts,
    TokenTreatment,
    cispo_loss,
    compute_loss,
    default_loss,
    gspo_loss,
    ipo_loss,
    ppo_loss,
    reinforce_loss,
)

ln = math.log


def ppo(t, i, a, clip_low=0.2, clip_high=0.2, dual_clip=None):
    """(loss, gradient, clipped) of one token."""
    r = math.exp(t - i)
    worth = min(r * a, min(max(r, 1 - clip_low), 1 + clip_high) * a)
    clipped = worth != r * a
    if dual_clip is not None and a < 0 and worth < dual_clip * a:
        worth, clipped = dual_clip * a, True
    return -worth, 0.0 if clipped else -r * a, clipped


def cispo(t, i, a, clip_high=5.0, clip_low=None):
    r = math.exp(t - i)
    weight = max(min(r, clip_high), clip_low or 0.0)
    return -weight * a * t, -weight * a, weight != r


def ipo(t, i, a, eps=0.3, kl_tau=0.0, delta=8.0):
    r, dropped = math.exp(t - i), abs(math.exp(t) - math.exp(i)) > eps
    worth = 0.0 if dropped else a * min(r, delta)
    return kl_tau * (t - i) ** 2 - worth, 2 * kl_tau * (t - i) - (0.0 if dropped or r > delta else a * r), dropped


def reinforce(t, i, a):
    return -a * t, -a, None


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("fn", "formula", "options"),
    [
        (ppo_loss, ppo, {}),
        (ppo_loss, ppo, {"clip_low": 0.1, "clip_high": 0.9}),
        (ppo_loss, ppo, {"dual_clip": 1.5}),
        (cispo_loss, cispo, {}),
        (cispo_loss, cispo, {"clip_low": 0.7, "clip_high": 1.2}),
        (ipo_loss, ipo, {}),
        (ipo_loss, ipo, {"eps": 0.05, "kl_tau": 0.3, "delta": 1.5}),
        (reinforce_loss, reinforce, {}),
    ],
)
def test_matches_the_formula(fn, formula, options, seed):
    """Tokens off the mask, of weight 0 or without a measured logprob have none."""
    t, i, advantages, mask, weights = random_streams(seed)
    loss, grad, metrics = run(fn, inputs(t, i, advantages=advantages, mask=mask, weights=weights), **options)
    members = members_of(i, mask, weights)
    by_token = {n: formula(t[n], i[n], advantages[n], **options) for n in members}
    assert loss == pytest.approx(sum(weights[n] * by_token[n][0] for n in members), rel=1e-12)
    assert grad == pytest.approx([weights[n] * by_token[n][1] if n in members else 0.0 for n in range(len(t))])
    share = metrics.get("is_clipped", metrics.get("is_masked"))
    if fn is not reinforce_loss:
        assert share == pytest.approx(mean([by_token[n][2] for n in members]))
        assert fn is cispo_loss or options or 0 < share < 1, "clipped and unclipped tokens both"
    if fn is not ipo_loss:
        assert metrics["importance_ratio"] == pytest.approx(mean([math.exp(t[n] - i[n]) for n in members]))


@pytest.mark.parametrize(
    "fn",
    [ppo_loss, functools.partial(ppo_loss, dual_clip=1.5), functools.partial(ipo_loss, kl_tau=0.2), reinforce_loss],
)
def test_gradient_by_finite_differences(fn):
    """Also with ratios to the trainer's own logprobs, which are constants."""
    t, i, advantages, mask, weights = random_streams(1)
    for proximal in ({}, {"proximal": True, "correction": "tis"}):

        def at(values, proximal=proximal):
            p = {"proximal_logprobs": torch.tensor(random_streams(2)[0], dtype=torch.float64)}
            return run(fn, inputs(values, i, advantages=advantages, mask=mask, weights=weights, **p), **proximal)

        _, grad, _ = at(t)
        for n in range(len(t)):
            up, down = (at([*t[:n], t[n] + step, *t[n + 1 :]])[0] for step in (1e-6, -1e-6))
            assert grad[n] == pytest.approx((up - down) / 2e-6, abs=1e-6)


def test_a_ratio_too_large_for_a_float_is_clipped():
    """exp(199) is more than float32 has."""
    given = inputs([-1.0, -1.0], [-200.0, -200.0], advantages=[1.0, -1.0], dtype=torch.float32)
    assert run(ppo_loss, given, dual_clip=3.0)[:2] == (pytest.approx(-1.2 + 3.0), [0.0, 0.0])
    assert run(cispo_loss, given)[:2] == (pytest.approx(0.0), [-5.0, 5.0])
    assert run(ppo_loss, given, correction="icepop")[:2] == (0.0, [0.0, 0.0])


# --- corrections: rho = 4, 1 and 1/4, of weights 1, 2 and 1

POLICY, SAMPLER = [ln(0.8), ln(0.5), ln(0.1)], [ln(0.2), ln(0.5), ln(0.4)]
ADVANTAGES, WEIGHTS = [1.0, -1.0, 2.0], [1.0, 2.0, 1.0]


@pytest.mark.parametrize(
    ("options", "weights", "share"),
    [
        ({"correction": "tis"}, [2.0, 1.0, 0.25], 1 / 3),
        ({"correction": "tis", "correction_cap": 9.0}, [4.0, 1.0, 0.25], 0.0),
        ({"correction": "icepop"}, [4.0, 1.0, 0.0], 1 / 3),
        ({"correction": "icepop", "correction_high": 3.0}, [0.0, 1.0, 0.0], 2 / 3),
        ({"correction": "sequence"}, [1.0, 1.0, 1.0], 0.0),  # the geometric mean is 1
        ({"correction": "sequence", "correction_low": 1.01}, [0.0, 0.0, 0.0], 1.0),
    ],
)
def test_corrections_by_hand(options, weights, share):
    loss, gradient, metrics = run(
        reinforce_loss, inputs(POLICY, SAMPLER, advantages=ADVANTAGES, weights=WEIGHTS), **options
    )
    expected = [-w * a * c for w, a, c in zip(WEIGHTS, ADVANTAGES, weights, strict=True)]
    assert gradient == pytest.approx(expected)
    assert loss == pytest.approx(sum(g * t for g, t in zip(expected, POLICY, strict=True)))
    assert metrics["correction/share"] == pytest.approx(share)
    assert (metrics["correction/rho"], metrics["correction/rho/max"]) == (pytest.approx(1.75), pytest.approx(4.0))


def test_what_leaves_takes_regulariser_and_entropy_along():
    """icepop keeps the second token alone; a loss with a ratio of its own gets no second weight."""
    given = inputs(POLICY, SAMPLER, advantages=ADVANTAGES, entropy=torch.full((3,), 0.5, dtype=torch.float64))
    options = {"correction": "icepop", "correction_high": 3.0, "entropy_coef": 0.1, "kl_tau": 1.0}
    loss, gradient, _ = run(default_loss, given, **options)
    assert (loss, gradient) == (pytest.approx(1.0 - 0.05), pytest.approx([0.0, 1.0, 0.0]))
    wide = {"correction": "icepop", "correction_low": 0.1, "delta": None, "kl_tau": 0.0}
    _, gradient, _ = run(default_loss, given, dppo_mask_low=1.0, dppo_mask_high=1.0, **wide)
    assert gradient == pytest.approx([-4.0, 1.0, -0.5]), "-A times the loss's own ratio"


def test_a_correction_looks_at_the_logprobs_before_the_first_update():
    """p = 0.4, 0.5, 0.2: r = t / p = 2, 1, 1/2 and rho = p / i = 2, 1, 1/2; tis weighs A by at most 1.5."""
    p = torch.tensor([ln(0.4), ln(0.5), ln(0.2)], dtype=torch.float64)
    given = inputs(POLICY, SAMPLER, advantages=ADVANTAGES, proximal_logprobs=p)
    options = {"proximal": True, "correction": "tis", "correction_cap": 1.5}
    loss, gradient, metrics = run(ppo_loss, given, clip_high=0.5, **options)
    # A weighed: 1.5 (r clipped at 1.5), -1, 1 (r = 1/2, A > 0: kept)
    assert loss == pytest.approx(-1.5 * 1.5 + 1.0 - 0.5)
    assert gradient == pytest.approx([0.0, 1.0, -0.5])
    assert metrics["correction/rho/max"] == pytest.approx(2.0)
    _, gradient, _ = run(gspo_loss, given, proximal=True, clip_ratio_high=1.0, clip_ratio_low=0.9)
    assert gradient == pytest.approx([-1 / 3, 1 / 3, -2 / 3]), "s = 1, the geometric mean of 2, 1 and 1/2"
    with pytest.raises(ValueError, match="proximal_logprobs"):
        ppo_loss(inputs(POLICY, SAMPLER, advantages=ADVANTAGES), proximal=True)


def test_corrections_of_a_packed_row():
    """Sequences apart: rho 4 and 1 of mean 2 leave above 1.5, rho 1 and an unmeasured token stay, one has no member."""
    t = torch.tensor([ln(0.8), ln(0.5), ln(0.5), -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    treatment = TokenTreatment()
    loss, metrics = compute_loss(
        trainer_logprobs=t,
        inference_logprobs=torch.tensor([ln(0.2), ln(0.5), ln(0.5), math.nan, -9.0], dtype=torch.float64),
        loss_mask=torch.tensor([1, 1, 1, 1, 0], dtype=torch.bool),
        sequence_lengths=[2, 2, 1],
        advantages=torch.ones(5, dtype=torch.float64),
        counts=LossCounts(rl=3, rl_sequences=2),
        rl_loss=functools.partial(reinforce_loss, correction="sequence", correction_high=1.5),
        treatment=treatment,
    )
    loss.backward()
    assert t.grad.tolist() == pytest.approx([0.0, 0.0, -1 / 3, 0.0, 0.0]), "what left still counts in N"
    assert metrics["correction/share"] == (1.0, 2)
    assert metrics["correction/rho/max"] == (pytest.approx(4.0), 1)
    found = {label: tokens.tolist() for label, tokens in treatment.labels.items() if tokens.any()}
    assert found["rl corrected"] == [1, 1, 0, 0, 0] and found["rl kept"] == [0, 0, 1, 0, 0]


def test_tis_beside_a_ratio_of_the_loss_raises():
    """In a loss of a user's that extends ppo, too: no config says so before."""
    values = torch.zeros(2, dtype=torch.float64)
    with pytest.raises(ValueError, match="tis would count twice"):
        ppo_loss(inputs(values, values, advantages=values), correction="tis")
