"""`compute_loss`: membership, normalisation, isolation of components, and the contract of a custom loss."""

import functools
import math
import random

import pytest
import torch

from prl.trainer.loss import (
    LossCounts,
    LossInputs,
    LossOutputs,
    aipo_loss,
    ce_loss,
    compute_loss,
    count_members,
    default_loss,
    ref_kl_loss,
)

STREAMS = ("inference_logprobs", "loss_mask", "rl_weights", "ce_weights", "ref_kl_weights")


def batch(lengths=(5, 3, 8), padding=2, seed=0, dtype=torch.float64, **changes):
    """Random streams in which all three components have members and overlap; padding holds 0.0."""
    rng = random.Random(seed)
    tokens, n = sum(lengths), sum(lengths) + padding

    def stream(draw):
        return torch.tensor([draw() for _ in range(tokens)] + [0.0] * padding, dtype=dtype)

    streams = {
        "trainer_logprobs": stream(lambda: -rng.expovariate(1.0)).requires_grad_(),
        "inference_logprobs": stream(lambda: -rng.expovariate(1.0)),
        "loss_mask": stream(lambda: rng.random() < 0.6).bool(),
        "advantages": stream(lambda: rng.gauss(0, 1)),
        "ref_logprobs": stream(lambda: -rng.expovariate(1.0)),
        "rl_weights": stream(lambda: rng.choice([0.0, 1.0, 0.5])),
        "ce_weights": stream(lambda: rng.choice([0.0, 0.1, 1.0])),
        "ref_kl_weights": stream(lambda: rng.choice([0.0, 1.0, 2.0])),
        "sequence_lengths": list(lengths),
    }
    assert streams["trainer_logprobs"].shape == (n,)
    return streams | changes


def counts_of(streams):
    return LossCounts.from_tensor(count_members(**{name: streams[name] for name in STREAMS}))


def run(streams, counts=None, **kwargs):
    """(loss, gradient of the logprobs, metrics); the gradient is a fresh one."""
    leaf = streams["trainer_logprobs"].detach().clone().requires_grad_()
    loss, metrics = compute_loss(**streams | {"trainer_logprobs": leaf}, counts=counts or counts_of(streams), **kwargs)
    assert loss.dim() == 0 and loss.requires_grad
    loss.backward()
    return loss.detach(), leaf.grad, metrics


def loop(s, counts):
    """The definition, one token at a time with default knobs: (loss, gradient)."""
    t, i, adv, ref = (s[k].tolist() for k in ("trainer_logprobs", "inference_logprobs", "advantages", "ref_logprobs"))
    loss, grad = 0.0, [0.0] * len(t)
    for n in range(sum(s["sequence_lengths"])):
        usable = math.isfinite(i[n]) and i[n] != -9999
        w_rl, w_ce, w_kl = (s[k][n].item() for k in ("rl_weights", "ce_weights", "ref_kl_weights"))
        if w_ce:
            loss -= w_ce * t[n] / counts.ce
            grad[n] -= w_ce / counts.ce
        if not usable:
            continue
        rho, d, gap = math.exp(t[n] - i[n]), math.exp(t[n]) - math.exp(i[n]), t[n] - i[n]
        if s["loss_mask"][n] and w_rl:
            keep = not (d > 0.2 if adv[n] > 0 else d < -0.2)
            loss += w_rl * (-keep * adv[n] * min(rho, 8.0) + 1e-3 * gap**2) / counts.rl
            grad[n] += w_rl * (-keep * adv[n] * rho * (rho <= 8) + 2e-3 * gap) / counts.rl
        if w_kl:
            keep, k = not d < -0.2, ref[n] - t[n]
            loss += w_kl * (-keep * k * rho + 1e-3 * gap**2) / counts.ref_kl
            grad[n] += w_kl * (-keep * k * rho + 2e-3 * gap) / counts.ref_kl
    return loss, grad


@pytest.mark.parametrize("seed", range(6))
def test_matches_the_definition(seed):
    s = batch(seed=seed)
    s["inference_logprobs"][[0, 4, 9]] = torch.tensor([-9999.0, math.nan, -math.inf], dtype=torch.float64)
    counts = LossCounts(rl=17, ce=5, ref_kl=9)
    loss, grad, _ = run(s, counts)
    expected, expected_grad = loop(s, counts)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert grad.tolist() == pytest.approx(expected_grad, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("seed", range(3))
def test_gradient_by_finite_differences(seed):
    s = batch(seed=seed, ref_kl_weights=None)  # k is a constant in ref_kl's gradient: no finite difference shows that
    _, grad, _ = run(s)
    for n in range(len(grad)):
        step = torch.zeros(len(grad), dtype=torch.float64).index_fill_(0, torch.tensor([n]), 1e-6)
        moved = [run(s | {"trainer_logprobs": s["trainer_logprobs"] + sign * step})[0] for sign in (1, -1)]
        assert grad[n].item() == pytest.approx((moved[0] - moved[1]).item() / 2e-6, abs=1e-7)


# --- members and counts


def test_counts_by_hand():
    counts = count_members(
        inference_logprobs=torch.tensor([-1.0, -9999.0, -1.0, math.nan, -1.0, -math.inf, 0.0]),
        loss_mask=torch.tensor([1, 1, 1, 0, 0, 0, 0], dtype=torch.bool),
        rl_weights=torch.tensor([2.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0]),
        ce_weights=torch.tensor([0.0, 0.1, 0.0, 0.1, 0.0, 0.1, 0.0]),
        ref_kl_weights=torch.tensor([0.5, 0.0, -0.5, 0.0, 0.0, 1.0, 0.0]),
    )
    assert counts.tolist() == [1, 3, 2, 2] and counts.dtype == torch.int64
    assert LossCounts.from_tensor(counts) == LossCounts(rl=1, ce=3, ref_kl=2, invalid=2)


def test_counts_of_plain_grpo_and_of_nothing():
    mask = torch.tensor([True, False, True])
    streams = {"inference_logprobs": torch.zeros(3), "loss_mask": mask}
    assert count_members(**streams).tolist() == [2, 0, 0, 0]
    assert count_members(**streams, sequence_lengths=[1]).tolist() == [1, 0, 0, 0]
    assert LossCounts.from_tensor(torch.zeros(4)) == LossCounts(1, 1, 1, 0)


def test_an_invalid_token_of_two_components_is_counted_once():
    one = torch.ones(1)
    counts = count_members(inference_logprobs=-9999 * one, loss_mask=one.bool(), ref_kl_weights=one, ce_weights=one)
    assert counts.tolist() == [0, 1, 0, 1]


def test_the_count_counts_tokens_it_does_not_sum_weights():
    s = batch()
    loss, grad, _ = run(s | {"ce_weights": None, "ref_kl_weights": None})
    twice = s | {"rl_weights": 2 * s["rl_weights"], "ce_weights": None, "ref_kl_weights": None}
    assert counts_of(twice).rl == counts_of(s).rl
    torch.testing.assert_close(run(twice)[0], 2 * loss)
    torch.testing.assert_close(run(twice)[1], 2 * grad)


def test_absent_rl_weights_are_ones():
    s = batch(ce_weights=None, ref_kl_weights=None)
    ones = run(s | {"rl_weights": torch.ones_like(s["advantages"])})
    absent = run(s | {"rl_weights": None})
    assert absent[0] == ones[0] and torch.equal(absent[1], ones[1])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -9999.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_unusable_sampler_logprobs_leave_rl_and_ref_kl_but_not_ce(bad, dtype):
    s = batch(dtype=dtype)
    s["inference_logprobs"][:] = bad
    counts = counts_of(s)
    wanted = (s["loss_mask"] & (s["rl_weights"] != 0)) | (s["ref_kl_weights"] != 0)
    assert (counts.rl, counts.ref_kl, counts.invalid) == (1, 1, wanted.sum())
    loss, grad, metrics = run(s, counts)
    ce_only = run(s | {"loss_mask": torch.zeros_like(s["loss_mask"]), "ref_kl_weights": None}, counts)
    assert counts.ce > 0 and loss.isfinite() and loss == ce_only[0] and torch.equal(grad, ce_only[1])
    assert set(metrics) == {"loss/ce", "nll"}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -9999.0, 1e30])
@pytest.mark.parametrize("name", ["trainer_logprobs", "inference_logprobs", "advantages", "ref_logprobs"])
def test_what_stands_on_non_members_does_not_matter(name, bad):
    s = batch()
    member = (s["loss_mask"] & (s["rl_weights"] != 0)) | (s["ce_weights"] != 0) | (s["ref_kl_weights"] != 0)
    assert 0 < member.sum() < len(member) - 2
    dirty = s | {name: torch.where(member, s[name].detach(), bad)}
    assert counts_of(dirty) == counts_of(s)
    clean_run, dirty_run = run(s), run(dirty)
    assert clean_run[0] == dirty_run[0] and torch.equal(clean_run[1], dirty_run[1])
    assert clean_run[2] == dirty_run[2]


def test_padding_never_enters_even_when_its_streams_are_not_zero():
    clean, dirty = batch(padding=0), batch(padding=3)
    for name in ("inference_logprobs", "advantages", "ref_logprobs", "rl_weights", "ce_weights", "ref_kl_weights"):
        dirty[name][-3:] = 1.0
    dirty["loss_mask"][-3:] = True
    counts = counts_of(clean)
    with_lengths = count_members(**{k: dirty[k] for k in STREAMS}, sequence_lengths=dirty["sequence_lengths"])
    assert LossCounts.from_tensor(with_lengths) == counts
    loss, grad, metrics = run(dirty, counts)
    assert loss == run(clean, counts)[0] and metrics == run(clean, counts)[2]
    assert torch.equal(grad[:-3], run(clean, counts)[1]) and not grad[-3:].any()


# --- components beside each other


def test_other_components_leave_the_rl_gradient_bitwise_unchanged():
    s = batch(dtype=torch.float32)
    alone = s | {"ce_weights": None, "ref_kl_weights": None}
    elsewhere = torch.where(s["loss_mask"], 0.0, 1.0)
    beside = alone | {"ce_weights": elsewhere, "ref_kl_weights": elsewhere}
    assert counts_of(beside).ce > 1 and counts_of(alone).rl == counts_of(beside).rl
    rl = s["loss_mask"]
    assert torch.equal(run(alone)[1][rl], run(beside)[1][rl]) and run(beside)[1][~rl].any()


def test_overlapping_components_add():
    s = batch()
    none = torch.zeros_like(s["loss_mask"])
    counts = counts_of(s)
    rl = run(s | {"ce_weights": None, "ref_kl_weights": None}, counts)
    ce = run(s | {"loss_mask": none, "ref_kl_weights": None}, counts)
    kl = run(s | {"loss_mask": none, "ce_weights": None}, counts)
    overlap = s["loss_mask"] & (s["rl_weights"] != 0) & (s["ce_weights"] != 0) & (s["ref_kl_weights"] != 0)
    assert overlap.any()
    torch.testing.assert_close(run(s, counts)[1], rl[1] + ce[1] + kl[1], rtol=1e-13, atol=0)
    torch.testing.assert_close(run(s, counts)[0], rl[0] + ce[0] + kl[0])


@pytest.mark.parametrize("rl_loss", [default_loss, aipo_loss, lambda inputs: default_loss(inputs, delta=1.1)])
def test_the_rl_loss_does_not_touch_ce_and_ref_kl(rl_loss):
    s = batch()
    outside = ~(s["loss_mask"] & (s["rl_weights"] != 0))
    assert torch.equal(run(s, rl_loss=rl_loss)[1][outside], run(s)[1][outside])


def cut(s, start, stop, lengths):
    rows = {k: v[start:stop] if isinstance(v, torch.Tensor) else v for k, v in s.items()}
    return rows | {"sequence_lengths": lengths}


def test_packed_is_the_sum_of_its_samples():
    """Loss, gradient, counts and metrics: however the step is cut into micro-batches, the totals are the same."""
    s = batch(padding=0)
    parts = [cut(s, 0, 5, [5]), cut(s, 5, 16, [3, 8])]
    local = torch.stack([count_members(**{k: p[k] for k in STREAMS}) for p in parts]).sum(0)
    counts = LossCounts.from_tensor(local)
    assert counts == counts_of(s)
    loss, grad, metrics = run(s, counts)
    runs = [run(p, counts) for p in parts]
    torch.testing.assert_close(sum(r[0] for r in runs), loss)
    assert torch.equal(torch.cat([r[1] for r in runs]), grad)
    for name, (total, count) in metrics.items():
        assert float(sum(r[2][name][0] for r in runs)) == pytest.approx(float(total))
        assert sum(int(r[2][name][1]) for r in runs) == int(count)


def test_the_component_metrics_are_the_terms_of_the_loss():
    s = batch()
    loss, _, metrics = run(s)
    terms = [metrics[f"loss/{name}"] for name in ("rl", "ce", "ref_kl")]
    assert float(sum(total / count for total, count in terms)) == pytest.approx(loss.item())


# --- metrics


def test_float32_terms_add_up_in_float64():
    """So the sum is the same however ranks and micro-batches divide the tokens, though its terms nearly cancel."""
    streams = batch(lengths=(2_000,) * 25, padding=0, dtype=torch.float32)
    counts = counts_of(streams)
    loss, _, metrics = run(streams, counts)
    parts = [slice(start, start + 2_000) for start in range(0, 50_000, 2_000)]
    rows = [
        {name: stream[part] for name, stream in streams.items() if torch.is_tensor(stream)}
        | {"sequence_lengths": [2_000]}
        for part in parts
    ]
    total = sum(run(row, counts)[0] for row in rows)
    assert loss.dtype == torch.float64 and loss.item() == pytest.approx(total.item(), rel=1e-12)
    of_components = sum(metrics[f"loss/{name}"][0] / getattr(counts, name) for name in ("rl", "ce", "ref_kl"))
    assert loss.item() == pytest.approx(of_components.item(), rel=1e-14)


def test_sequence_metrics_average_over_the_sequences_that_have_tokens():
    """Two sequences of two tokens, one dropped token in the first; the third has no member at all."""
    ln = math.log
    t = torch.tensor([ln(0.8), ln(0.5), ln(0.5), ln(0.5), ln(0.5)], dtype=torch.float64, requires_grad=True)
    s = batch((2, 2, 1), 0, trainer_logprobs=t, rl_weights=None, ce_weights=None, ref_kl_weights=None)
    s["inference_logprobs"] = torch.tensor([ln(0.4), ln(0.5), ln(0.5), ln(0.5), ln(0.5)], dtype=torch.float64)
    s["advantages"] = torch.ones(5, dtype=torch.float64)
    s["loss_mask"] = torch.tensor([True, True, True, True, False])
    metrics = {k: (float(total), int(count)) for k, (total, count) in run(s)[2].items()}
    mismatch = 2 - ln(2) - 1
    assert metrics["is_masked"] == (0.5, 2)
    assert metrics["masked_mismatch_kl"] == (pytest.approx(mismatch), 1)
    assert metrics["masked_advantage_positive"] == (1.0, 1)
    assert metrics["unmasked_mismatch_kl"] == (0.0, 2)
    assert metrics["mismatch_kl"] == (pytest.approx(mismatch), 4)  # these two are per token
    assert metrics["logprob_gap"] == (pytest.approx(ln(2)), 4)
    assert metrics["loss/rl"][1] == 4 and "nll" not in metrics and "ref_kl" not in metrics


def test_mismatch_kl_counts_a_token_of_both_rl_and_ref_kl_once():
    s = batch()
    sampled = (s["loss_mask"] & (s["rl_weights"] != 0)) | (s["ref_kl_weights"] != 0)
    gap = (s["trainer_logprobs"].detach() - s["inference_logprobs"])[sampled]
    total, count = run(s)[2]["logprob_gap"]
    assert float(total) == pytest.approx(gap.abs().sum().item()) and count == sampled.sum()


@pytest.mark.parametrize(
    "fn, knobs", [(default_loss, {"dppo_mask_high": 0.05, "delta": 1.1}), (aipo_loss, {"delta": 1.1})]
)
def test_one_pass_over_the_row_equals_a_pass_per_sequence(fn, knobs):
    """Built-in losses take the whole row at once; hidden in a lambda they are run like a custom loss."""
    s = batch(ref_kl_weights=None)
    row = run(s, rl_loss=functools.partial(fn, **knobs))
    each = run(s, rl_loss=lambda inputs: fn(inputs, **knobs))
    torch.testing.assert_close(row[0], each[0])
    assert torch.equal(row[1], each[1])
    assert set(row[2]) == set(each[2])
    for name in row[2]:
        assert float(row[2][name][0]) == pytest.approx(float(each[2][name][0])), name
        # Called directly the losses say 0.0 where a sequence has no dropped (kept) token; the row leaves it out.
        if "mismatch" not in name and "masked_advantage" not in name:
            assert int(row[2][name][1]) == int(each[2][name][1]), name


def test_knobs_reach_the_fixed_losses():
    s = batch(loss_mask=torch.zeros(18, dtype=torch.bool), ce_weights=None)
    knobs = {"mask_low": 0.01, "kl_tau": 0.5}
    x = LossInputs(
        s["trainer_logprobs"],
        s["inference_logprobs"],
        s["ref_logprobs"],
        None,
        s["ref_kl_weights"] != 0,
        s["ref_kl_weights"],
    )
    expected = ref_kl_loss(x, **knobs).loss / counts_of(s).ref_kl
    torch.testing.assert_close(run(s, ref_kl_loss=functools.partial(ref_kl_loss, **knobs))[0], expected.detach())


# --- nothing to train on


@pytest.mark.parametrize("t", [-1.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("lengths, padding", [((3, 2), 1), ((), 4), ((0,), 0), ((), 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_members_gives_a_zero_that_still_runs_backward(t, lengths, padding, dtype):
    n = sum(lengths) + padding
    dummy = batch(lengths, padding, dtype=dtype, advantages=None, ref_logprobs=None, rl_weights=None, ce_weights=None)
    dummy |= {"ref_kl_weights": None, "loss_mask": torch.zeros(n, dtype=torch.bool)}
    dummy |= {"trainer_logprobs": torch.full((n,), t, dtype=dtype)}
    loss, grad, metrics = run(dummy)
    assert loss == 0 and torch.equal(grad, torch.zeros(n, dtype=dtype)) and metrics == {}


def test_weights_of_zero_empty_a_component():
    zero = torch.zeros(18, dtype=torch.float64)
    s = batch(rl_weights=zero, ce_weights=zero, ref_kl_weights=zero, advantages=None, ref_logprobs=None)
    loss, grad, metrics = run(s)
    assert loss == 0 and not grad.any() and metrics == {}


def test_bf16_inputs_are_computed_in_float32():
    s = batch(dtype=torch.bfloat16)
    loss, grad, _ = run(s)
    exact = run({k: v.detach().double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in s.items()})
    assert loss.dtype == torch.float64 and grad.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(exact[0].item(), rel=1e-5)


# --- errors


def test_missing_advantages():
    with pytest.raises(ValueError, match=r"rl loss.*no advantages"):
        run(batch(advantages=None))
    run(batch(advantages=None, loss_mask=torch.zeros(18, dtype=torch.bool)))  # opd, opsd and sft ship none


def test_missing_ref_logprobs():
    with pytest.raises(ValueError, match=r"ref_logprobs.*opd and opsd"):
        run(batch(ref_logprobs=None))
    run(batch(ref_logprobs=None, ref_kl_weights=None))


@pytest.mark.parametrize("name", [*STREAMS, "advantages", "ref_logprobs"])
def test_a_misaligned_stream_is_named(name):
    s = batch()
    with pytest.raises(ValueError, match=name):
        run(s | {name: s[name][:-1]}, LossCounts())


def test_too_long_sequences():
    with pytest.raises(ValueError, match="sum to 99"):
        run(batch(sequence_lengths=[99]))


# --- custom losses


def ppo_clip(inputs, clip_eps=0.2):
    """The documented example: exponentiates everything, then masks."""
    ratio = torch.exp(inputs.trainer_logprobs - inputs.inference_logprobs)
    clipped = torch.clamp(ratio, 1 - clip_eps, 1 + clip_eps)
    loss = -torch.min(ratio * inputs.advantages, clipped * inputs.advantages)[inputs.loss_mask].sum()
    return LossOutputs(loss, {"clip_frac": (ratio != clipped)[inputs.loss_mask].float().mean()})


def test_a_custom_loss_gets_one_sequence_and_its_members():
    s, seen = batch(), []

    def spy(inputs):
        seen.append(inputs)
        return ce_loss(inputs)

    s["loss_mask"][5:8] = False  # the second sequence has no member: it is not shown
    run(s, rl_loss=spy)
    assert [len(x.loss_mask) for x in seen] == [5, 8]
    for x, rows in zip(seen, (slice(0, 5), slice(8, 16)), strict=True):
        members = (s["loss_mask"] & (s["rl_weights"] != 0))[rows]
        assert torch.equal(x.loss_mask, members)
        for ours, stream in (("trainer_logprobs",) * 2, ("advantages",) * 2, ("loss_weights", "rl_weights")):
            assert torch.equal(getattr(x, ours), torch.where(members, s[stream][rows], 0.0))


@pytest.mark.parametrize("bad", [-9999.0, math.nan, -math.inf])
def test_a_custom_loss_that_masks_too_late_is_safe(bad):
    s = batch(rl_weights=None, ce_weights=None, ref_kl_weights=None)
    clean = run(s, rl_loss=ppo_clip)
    s["inference_logprobs"] = torch.where(s["loss_mask"], s["inference_logprobs"], bad)
    dirty = run(s, rl_loss=functools.partial(ppo_clip, clip_eps=0.2))
    assert clean[0].isfinite() and clean[0] == dirty[0] and torch.equal(clean[1], dirty[1])
    assert dirty[2]["clip_frac"][1] == 3


def test_a_custom_metric_never_mixes_with_ours():
    def fn(inputs):
        metrics = {"mismatch_kl": torch.tensor(7.0), "nll": 3.0, "ref_kl/is_masked": 5.0, "mine": torch.tensor(1)}
        return LossOutputs(ce_loss(inputs).loss, metrics)

    metrics = run(batch(), rl_loss=fn)[2]
    assert metrics["rl/ref_kl/is_masked"] == (15.0, 3) and "ref_kl/is_masked" in metrics
    assert metrics["rl/mismatch_kl"] == (21.0, 3) and metrics["rl/nll"] == (9.0, 3) and metrics["mine"] == (3.0, 3)
    assert float(metrics["nll"][0]) != 9 and float(metrics["mismatch_kl"][0]) != 21


def returns_tensor(inputs):
    return inputs.trainer_logprobs.sum()


def returns_float(inputs):
    return LossOutputs(1.0, {})


def returns_vector(inputs):
    return LossOutputs(inputs.trainer_logprobs, {})


def returns_detached(inputs):
    return LossOutputs(inputs.trainer_logprobs.detach().sum(), {})


def returns_vector_metric(inputs):
    return LossOutputs(inputs.trainer_logprobs.sum(), {"per_token": inputs.advantages})


@pytest.mark.parametrize(
    "fn, error, message",
    [
        (returns_tensor, TypeError, "must return LossOutputs.*not Tensor"),
        (returns_float, TypeError, "tensor as its loss, not float"),
        (returns_vector, ValueError, "scalar loss"),
        (returns_detached, ValueError, "without gradient"),
        (returns_vector_metric, ValueError, "metric 'per_token'"),
    ],
)
@pytest.mark.parametrize("wrap", [lambda fn: fn, functools.partial], ids=["plain", "partial"])
def test_a_custom_loss_that_breaks_the_contract_is_named(fn, error, message, wrap):
    with pytest.raises(error, match=f"{fn.__name__} .*{message}"):
        run(batch(), rl_loss=wrap(fn))


def test_evaluation_without_gradient():
    s = batch()
    s["trainer_logprobs"] = s["trainer_logprobs"].detach()
    loss, _ = compute_loss(**s, counts=counts_of(s), rl_loss=ppo_clip)
    assert loss.isfinite() and not loss.requires_grad
