"""`compute_loss`: membership, normalisation, isolation of components, and the contract of a custom loss."""

import functools
import math
import random

import pytest
import torch

from prl.losses import LossCounts, LossOutputs, aipo_loss, ce_loss, compute_loss, count_members, default_loss

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
    return LossCounts.from_tensor(count_members(**{name: streams[name] for name in (*STREAMS, "sequence_lengths")}))


def run(streams, counts=None, **kwargs):
    """(loss, gradient of the logprobs, metrics); the gradient is a fresh one."""
    leaf = streams["trainer_logprobs"].detach().clone().requires_grad_()
    given = streams | {"trainer_logprobs": leaf} | kwargs
    loss, metrics = compute_loss(**given, counts=counts or counts_of(streams))
    assert loss.dim() == 0 and loss.requires_grad
    loss.backward()
    return loss.detach(), leaf.grad, metrics


def loop(s, counts):
    """The definition, one token at a time with default options: (loss, gradient)."""
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


@pytest.mark.parametrize("seed", range(4))
def test_matches_the_definition(seed):
    s = batch(seed=seed)
    s["inference_logprobs"][[0, 4, 9]] = torch.tensor([-9999.0, math.nan, -math.inf], dtype=torch.float64)
    counts = LossCounts(rl=17, ce=5, ref_kl=9)
    loss, grad, _ = run(s, counts)
    expected, expected_grad = loop(s, counts)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert grad.tolist() == pytest.approx(expected_grad, rel=1e-12, abs=1e-14)


# --- members and counts


@pytest.mark.parametrize(
    ("i", "streams", "counts"),
    [
        ([-1.0, -1.0, -1.0], {"loss_mask": [1, 0, 1]}, [2, 0, 0, 0, 1]),
        ([-1.0, -1.0, -1.0], {"loss_mask": [1, 0, 1], "sequence_lengths": [1]}, [1, 0, 0, 0, 1]),
        ([-9999.0], {"loss_mask": [1], "ref_kl_weights": [1.0], "ce_weights": [1.0]}, [0, 1, 0, 1, 0]),  # invalid once
        (
            [-1.0, -9999.0, -1.0, math.nan, -1.0, -math.inf, 0.0],
            {
                "loss_mask": [1, 1, 1, 0, 0, 0, 0],
                "rl_weights": [2.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0],
                "ce_weights": [0.0, 0.1, 0.0, 0.1, 0.0, 0.1, 0.0],
                "ref_kl_weights": [0.5, 0.0, -0.5, 0.0, 0.0, 1.0, 0.0],
            },
            [1, 3, 2, 2, 1],
        ),
    ],
)
def test_counts_by_hand(i, streams, counts):
    """Tokens are counted, weights are not summed: rl, ce, ref_kl, what lacks a measured logprob alone; sequences."""
    lengths = streams.get("sequence_lengths", [len(i)])
    tensors = {name: torch.tensor(values) for name, values in streams.items() if name != "sequence_lengths"}
    tensors["loss_mask"] = tensors["loss_mask"].bool()
    found = count_members(inference_logprobs=torch.tensor(i), sequence_lengths=lengths, **tensors)
    assert found.tolist() == counts and found.dtype == torch.int64
    assert LossCounts.from_tensor(found) == LossCounts(
        *(max(1, count) for count in counts[:3]), counts[3], max(1, counts[4])
    )


def test_padding_never_enters_whatever_its_streams():
    clean, dirty = batch(padding=0), batch(padding=3)
    for name in ("inference_logprobs", "advantages", "ref_logprobs", "rl_weights", "ce_weights", "ref_kl_weights"):
        dirty[name][-3:] = 1.0
    dirty["loss_mask"][-3:] = True
    counts = counts_of(clean)
    assert counts_of(dirty) == counts
    loss, grad, metrics = run(dirty, counts)
    assert loss == run(clean, counts)[0] and metrics == run(clean, counts)[2]
    assert torch.equal(grad[:-3], run(clean, counts)[1]) and not grad[-3:].any()


# --- components beside each other


def cut(s, start, stop, lengths):
    rows = {k: v[start:stop] if isinstance(v, torch.Tensor) else v for k, v in s.items()}
    return rows | {"sequence_lengths": lengths}


def test_packed_is_the_sum_of_its_samples():
    """Loss, gradient, counts and metrics: however the step is cut into micro-batches, the totals are the same."""
    s = batch(padding=0)
    parts = [cut(s, 0, 5, [5]), cut(s, 5, 16, [3, 8])]
    read = [{k: p[k] for k in (*STREAMS, "sequence_lengths")} for p in parts]
    local = sum(count_members(**part) for part in read)
    counts = LossCounts.from_tensor(local)
    assert counts == counts_of(s)
    loss, grad, metrics = run(s, counts)
    runs = [run(p, counts) for p in parts]
    torch.testing.assert_close(sum(r[0] for r in runs), loss)
    assert torch.equal(torch.cat([r[1] for r in runs]), grad)
    for name, (total, count) in metrics.items():
        assert float(sum(r[2][name][0] for r in runs)) == pytest.approx(float(total))
        assert sum(int(r[2][name][1]) for r in runs) == int(count)


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
    terms = [metrics[f"loss/{name}"] for name in ("rl", "ce", "ref_kl")]
    assert [count for _, count in terms] == [counts.rl, counts.ce, counts.ref_kl]
    assert loss.item() == pytest.approx(sum(total / count for total, count in terms).item(), rel=1e-14)


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


@pytest.mark.parametrize(
    "fn, options", [(default_loss, {"dppo_mask_high": 0.05, "delta": 1.1}), (aipo_loss, {"delta": 1.1})]
)
def test_one_pass_equals_a_pass_per_sequence(fn, options):
    """Built-in losses take the whole row at once; hidden in a lambda they are run like a custom loss."""
    s = batch(ref_kl_weights=None)
    row = run(s, rl_loss=functools.partial(fn, **options))
    each = run(s, rl_loss=lambda inputs: fn(inputs, **options))
    torch.testing.assert_close(row[0], each[0])
    assert torch.equal(row[1], each[1])
    assert set(row[2]) == set(each[2])
    for name in row[2]:
        assert float(row[2][name][0]) == pytest.approx(float(each[2][name][0])), name
        # Called directly the losses say 0.0 where a sequence has no dropped (kept) token; the row leaves it out.
        if "mismatch" not in name and "masked_advantage" not in name:
            assert int(row[2][name][1]) == int(each[2][name][1]), name


def test_bf16_inputs_are_computed_in_float32():
    s = batch(dtype=torch.bfloat16)
    loss, grad, _ = run(s)
    exact = run({k: v.detach().double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in s.items()})
    assert loss.dtype == torch.float64 and grad.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(exact[0].item(), rel=1e-5)


# --- errors


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


def test_a_custom_loss_knows_the_step():
    """A coefficient that falls to 0: at step 3 of 4 it is a quarter."""

    def fading(inputs):
        return LossOutputs(ce_loss(inputs).loss * (1 - inputs.step / inputs.max_steps), {})

    s, counts = batch(ce_weights=None, ref_kl_weights=None), {"rl": 17}
    whole = run(s, LossCounts(**counts), rl_loss=ce_loss)
    found = run(s, LossCounts(**counts, step=3, max_steps=4), rl_loss=fading)
    assert whole[0] != 0 and found[0] == pytest.approx(whole[0] / 4)


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


# --- nothing to train on


@pytest.mark.parametrize("t", [-1.0, math.inf, math.nan])
@pytest.mark.parametrize("lengths, padding", [((3, 2), 1), ((), 4), ((0,), 0), ((), 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_members_give_a_zero_with_a_gradient(t, lengths, padding, dtype):
    n = sum(lengths) + padding
    weights = torch.zeros(n, dtype=dtype)
    row = batch(lengths, padding, dtype=dtype, advantages=None, ref_logprobs=None, ref_kl_weights=None)
    row |= {"trainer_logprobs": torch.full((n,), t, dtype=dtype), "ce_weights": weights}
    for dummy in (row | {"loss_mask": torch.zeros(n, dtype=torch.bool)}, row | {"rl_weights": weights}):
        loss, grad, metrics = run(dummy)
        assert loss == 0 and torch.equal(grad, weights) and metrics == {}


# --- refusals


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"advantages": None}, ValueError, "rl loss.*no advantages"),
        ({"ref_logprobs": None}, ValueError, "no ref_logprobs.*opd and opsd"),
        ({"sequence_lengths": [99]}, ValueError, "sum to 99"),
        ({"rl_loss": [default_loss]}, ValueError, "rl_loss has 1 functions for 3 sequences"),
        ({"rl_wieghts": None}, TypeError, "'rl_wieghts'"),
        *(({name: torch.ones(17) > 0}, ValueError, name) for name in (*STREAMS, "advantages", "ref_logprobs")),
    ],
)
def test_rows_that_cannot_be_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        run(batch(), LossCounts(), **changes)


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (lambda inputs: inputs.trainer_logprobs.sum(), TypeError, "must return LossOutputs.*not Tensor"),
        (lambda inputs: LossOutputs(1.0, {}), TypeError, "tensor as its loss, not float"),
        (lambda inputs: LossOutputs(inputs.trainer_logprobs, {}), ValueError, "scalar loss"),
        (lambda inputs: LossOutputs(inputs.advantages.sum(), {}), ValueError, "without gradient"),
        (
            lambda inputs: LossOutputs(inputs.trainer_logprobs.sum(), {"per_token": inputs.advantages}),
            ValueError,
            "metric 'per_token'",
        ),
    ],
)
def test_a_custom_loss_that_breaks_the_contract_is_named(returned, error, message):
    def mine(inputs):
        return returned(inputs)

    with pytest.raises(error, match=f"mine.* {message}"):
        run(batch(), rl_loss=functools.partial(mine))
