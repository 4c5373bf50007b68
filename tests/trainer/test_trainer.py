"""One training step on the tiny model, against the mathematics written out again: one sample at a time, in float64."""

import copy
import functools
import json
import math

import pytest
import torch

from prl.base.errors import PrlError
from prl.config.trainer import BFLOAT16, FLOAT32, AdamWConfig, RefKLConfig
from prl.losses import LossOutputs, default_loss
from prl.rollouts.messages import Reference, StepBatch
from prl.rollouts.packing import pack
from prl.trainer.export import TokenExport
from prl.trainer.trainer import Trainer

INITIAL = Reference("initial")
HIGH = LOW = 0.2
KL_TAU = 0.01
DELTA = 8.0  # the default


def make_trainer(model, *, tokens_per_forward=64, max_grad_norm=1e9, lr=1e-3, initial=None, **settings):
    rl_loss = functools.partial(default_loss, dppo_mask_low=LOW, dppo_mask_high=HIGH, kl_tau=KL_TAU)
    references = {} if initial is None else {"initial": lambda: copy.deepcopy(initial)}
    return Trainer(
        **{"rl_losses": {"": rl_loss}, "optim": AdamWConfig(lr=lr), "references": references} | settings,
        model=model,
        max_steps=4,
        tokens_per_forward=tokens_per_forward,
        head_chunk=7,
        max_grad_norm=max_grad_norm,
    )


def batch_of(samples, seq_len=32, truncated=0):
    rows, _ = pack(samples, seq_len, 1)
    return StepBatch(1, rows[0], truncated)


@pytest.fixture
def samples(make_sample):
    """Every component, in one batch: rl, weighted rl, echo, opd, sft, and a token of two components."""

    def weights(sample, off=0.0, on=1.0):
        return [on if m else off for m in sample.mask]

    plain = [make_sample(n, p, seed=i) for i, (n, p) in enumerate([(20, 4), (9, 2), (13, 6), (24, 1)])]
    # Likely for the sampler, and no more so for the model: these leave the trust regions, whatever the model's weights.
    plain[0].logprobs[-6:], plain[0].advantages[-6:] = [-0.01] * 6, [-0.8] * 6
    weighted = make_sample(11, 3, seed=5, rl_weights=[1.0] * 5 + [0.0, 0.5, 2.0] + [1.0] * 3)
    echo = make_sample(15, 9, seed=6, ce_weights=[0.0] * 5 + [0.1, 0.1, 0.3, 0.0] + [0.0] * 6)
    opd = make_sample(12, 4, seed=7, advantages=None)
    opd.logprobs[-5:] = [-0.01] * 5
    opd.rl_weights, opd.ref_kl_weights = [0.0] * 12, weights(opd)
    opd.ref_logprobs = [x - 0.4 + 0.1 * i for i, x in enumerate(opd.logprobs)]
    sft = make_sample(10, 5, seed=8, advantages=None, logprobs=[0.0] * 10)
    sft.rl_weights, sft.ce_weights = [0.0] * 10, weights(sft)
    both = make_sample(8, 2, seed=9)
    both.ref_kl_weights, both.ref_logprobs = weights(both, on=0.7), [-0.5] * 8
    return [*plain, weighted, echo, opd, sft, both]


def usable(x):
    return math.isfinite(x) and x > -9000


def members(sample):
    """Per token: its rl, ce and ref_kl weights, 0.0 for no member."""
    n = len(sample.token_ids)
    rl, ce, ref = sample.rl_weights or [1.0] * n, sample.ce_weights or [0.0] * n, sample.ref_kl_weights or [0.0] * n
    ok = [usable(x) for x in sample.logprobs]
    return [(rl[i] * sample.mask[i] * ok[i], ce[i], ref[i] * ok[i]) for i in range(n)]


def plain_logprobs(model, sample):
    ids = torch.tensor(sample.token_ids)
    temperatures = torch.tensor(sample.temperatures[1:], dtype=torch.float64)[:, None]
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1] / temperatures
    logp = logits.log_softmax(-1)
    return logp.gather(1, ids[1:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


@pytest.fixture
def moved(tiny):
    """The policy some updates later."""
    model, generator = copy.deepcopy(tiny), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    return model


def pulled(make_sample, length, prompt, seed):
    """A sample of grpo whose reference is the initial model."""
    weights = [0.4 * (place >= prompt) for place in range(length)]
    return make_sample(length, prompt, seed, ref_kl_weights=weights, reference=INITIAL)


def reference(model, samples, initial=None):
    """Gradients by name and the metrics, from the specification's formulas."""
    model = copy.deepcopy(model).double()
    initial = None if initial is None else copy.deepcopy(initial).double()
    counts = [max(1, sum(w[c] != 0 for s in samples for w in members(s))) for c in range(3)]
    loss, terms, gaps, kls, entropies, kinds = 0.0, [0.0, 0.0, 0.0], [], [], [], set()
    for sample in samples:
        logprobs, entropy = plain_logprobs(model, sample)
        ref_logprobs = sample.ref_logprobs
        if sample.reference.model:
            ref_logprobs = [0.0, *plain_logprobs(initial, sample)[0].tolist()]
        for position, (rl, ce, ref) in enumerate(members(sample)):
            if not (rl or ce or ref):
                continue
            t, i = logprobs[position - 1], sample.logprobs[position]
            entropies.append(entropy[position - 1].item())
            if rl or ref:
                gap = t.item() - i
                gaps.append(abs(gap))
                kls.append(math.exp(gap) - gap - 1)
                d = math.exp(t.item()) - math.exp(i)
            parts = [0.0, 0.0, 0.0]
            if rl:
                a = sample.advantages[position]
                drop = d > HIGH if a > 0 else d < -LOW
                kinds.add(("rl", drop))
                parts[0] = rl * (KL_TAU * (t - i) ** 2 - (0.0 if drop else a * (t - i).exp().clamp(max=DELTA)))
            if ce:
                kinds.add("ce")
                parts[1] = -ce * t
            if ref:
                k = ref_logprobs[position] - t.item()
                drop = d < -0.2
                kinds.add(("ref_kl", drop))
                parts[2] = ref * (1e-3 * (t - i) ** 2 - (0.0 if drop else k * (t - i).exp()))
            for c, part in enumerate(parts):
                loss = loss + part / counts[c]
                terms[c] += float(torch.as_tensor(part).detach()) / counts[c]
    loss.backward()

    def mean(values):
        return sum(values) / len(values)

    metrics = {
        "loss/mean": loss.item(),
        "loss/rl": terms[0],
        "loss/ce": terms[1],
        "loss/ref_kl": terms[2],
        "mismatch_kl/all/mean": mean(kls),
        "logprob_gap/mean": mean(gaps),
        "entropy/all/mean": mean(entropies),
        "tokens/trained": len(entropies),
        "tokens/forward": sum(len(s.token_ids) - 1 for s in samples),  # nothing stands after the last
        "tokens/rl": counts[0],
        "tokens/ce": counts[1],
        "tokens/ref_kl": counts[2],
    }
    return {name: p.grad for name, p in model.named_parameters()}, metrics, kinds


def gradients(model):
    return {name: p.grad.double() for name, p in model.named_parameters()}


def assert_same(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name in expected:
        gap = (found[name] - expected[name]).norm().item()
        assert gap <= tolerance * expected[name].norm().item() + 1e-9, f"{name}: {gap}"


def test_gradient_and_metrics_of_a_step_match_the_formulas(moved, tiny, samples, make_sample):
    """Also where the trainer fills in the logprobs of the model that the run began with."""
    samples = [*samples, *(pulled(make_sample, 14 + i, 4, seed=3) for i in range(3))]
    expected, metrics, kinds = reference(moved, samples, tiny)
    assert kinds == {("rl", True), ("rl", False), "ce", ("ref_kl", True), ("ref_kl", False)}, "the case is too easy"
    batch = batch_of(samples)
    assert len(batch.micro_batches) > 3
    assert any(len(row.sequence_lengths) > 1 for row in batch.micro_batches)
    assert any(len(set(row.references)) == 2 for row in batch.micro_batches), "no row has both sources"
    forward = metrics.pop("tokens/forward")
    norm = math.sqrt(sum(g.square().sum().item() for g in expected.values()))
    for share, tokens in ((True, 64), (True, 1), (True, 100_000), (False, 70)):
        model = copy.deepcopy(moved)
        found = make_trainer(model, tokens_per_forward=tokens, share_prefixes=share, initial=tiny).train_step(batch)
        assert_same(gradients(model), expected, 2e-4)
        assert (found["tokens/forward"] < forward) == (share and tokens > 1)
        assert {name: found[name] for name in metrics} == pytest.approx(metrics, rel=1e-4, abs=1e-6)
        assert found["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("precision", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def test_the_reference_stays_the_initial_model(request, tiny, make_sample, tmp_path, precision):
    """Its KL is zero until the policy moves: both go through the same layers. The export shows what the loss read."""
    if precision.is_mixed:
        request.getfixturevalue("a_rank")
    initial = copy.deepcopy(tiny)
    trainer = make_trainer(tiny, initial=initial, precision=precision, export=TokenExport(tmp_path, 0))
    batch = batch_of([pulled(make_sample, 14 + i, 4, seed=3) for i in range(3)])
    assert abs(trainer.train_step(batch)["ref_kl"]) < 1e-6
    assert abs(trainer.train_step(batch)["ref_kl"]) > 1e-3
    line = json.loads((tmp_path / "tokens/step_000001/rank_0.jsonl").read_text().splitlines()[0])
    (sample,) = [pulled(make_sample, len(line["mask"]), 4, seed=3)]
    expected = plain_logprobs(initial.double(), sample)[0][3:].tolist()
    assert line["ref_logprobs"][4:] == pytest.approx(expected, abs=0.2 if precision.is_mixed else 2e-5)
    assert all(parameter.grad is None for parameter in trainer.references["initial"].parameters())


def test_settings_of_ref_kl_reach_its_loss(tiny, moved, make_sample):
    """At mask_low=0 every token whose probability fell is dropped."""
    samples = [pulled(make_sample, 14 + i, 4, seed=3) for i in range(3)]
    for sample in samples:
        sample.rl_weights = [0.0] * len(sample.mask)
    gaps = []
    for sample in samples:
        new = plain_logprobs(copy.deepcopy(moved).double(), sample)[0].tolist()[3:]
        gaps.append([t - i for t, i in zip(new, sample.logprobs[4:], strict=True)])
    found = make_trainer(moved, initial=tiny, ref_kl=RefKLConfig(mask_low=0.0)).train_step(batch_of(samples))
    shares = [sum(gap < 0 for gap in of_one) / len(of_one) for of_one in gaps]
    assert found["ref_kl/is_masked"] == pytest.approx(sum(shares) / 3)


@pytest.mark.parametrize("what", ["dummy", "masked", "zero weights"])
def test_nothing_to_train_is_a_no_op(tiny, make_sample, what):
    if what == "dummy":
        batch = batch_of([])
    elif what == "masked":
        batch = batch_of([make_sample(9, 9, seed=i, advantages=None, logprobs=[float("nan")] * 9) for i in range(3)])
    else:
        batch = batch_of([make_sample(9, 3, rl_weights=[0.0] * 9)])
    before = copy.deepcopy(tiny.state_dict())
    found = make_trainer(tiny).train_step(batch)
    for name, value in tiny.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert found["grad_norm"] == 0.0 and found["loss/mean"] == 0.0 and found["tokens/trained"] == 0.0
    assert found["tokens/rl"] == found["tokens/ce"] == found["tokens/ref_kl"] == 0.0  # the loss divides by 1
    assert all(math.isfinite(value) for value in found.values())


@pytest.mark.parametrize("bad", [float("nan"), -9999.0])
def test_unusable_sampler_logprobs_leave_mask_and_count(tiny, make_sample, bad):
    samples = [make_sample(12, 3, seed=1), make_sample(10, 2, seed=2)]
    samples[0].logprobs[5] = samples[1].logprobs[2] = samples[1].logprobs[9] = bad
    samples[1].logprobs[0] = bad  # on the prompt: not a member in any case, so not counted
    broken = copy.deepcopy(tiny)
    found = make_trainer(broken).train_step(batch_of(samples))
    assert found["tokens/invalid_logprobs"] == 3.0
    expected, metrics, _ = reference(tiny, samples)  # drops them from members and from N
    assert_same(gradients(broken), expected, 2e-4)
    assert found["loss/mean"] == pytest.approx(metrics["loss/mean"], rel=1e-4)
    assert found["logprob_gap/mean"] == pytest.approx(metrics["logprob_gap/mean"], rel=1e-4)
    assert all(math.isfinite(value) for value in found.values())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_not_finite_leaves_the_weights(tiny, make_sample, bad):
    sample = make_sample(12, 3)
    sample.advantages[7] = bad
    trainer = make_trainer(tiny)
    trainer.train_step(batch_of([make_sample(12, 3)]))  # so that there is optimiser state to spoil
    weights, states = copy.deepcopy(tiny.state_dict()), copy.deepcopy(list(trainer.optimizer.state.values()))
    with pytest.raises(PrlError, match="gradient's norm is (nan|inf).*weights were left"):
        trainer.train_step(batch_of([sample]))
    for name, value in tiny.state_dict().items():
        assert torch.equal(value, weights[name]), name
    assert states
    for state, before in zip(trainer.optimizer.state.values(), states, strict=True):
        assert all(torch.equal(value, before[name]) for name, value in state.items())


def test_clipping_and_the_rate_of_the_schedule(tiny, make_sample):
    """AdamW's first step moves each weight by lr * g / (|g| + eps): the size shows the rate."""
    schedule = {"_target_": "prl.trainer.schedule.Constant", "warmup_steps": 1}
    trainer = make_trainer(tiny, max_grad_norm=0.5, schedule=schedule)
    before = copy.deepcopy(tiny.state_dict())
    found = trainer.train_step(batch_of([make_sample(20, 4)]))
    assert found["grad_norm"] > 0.5  # reported before clipping
    clipped = math.sqrt(sum(g.square().sum().item() for g in gradients(tiny).values()))
    assert clipped == pytest.approx(0.5, rel=1e-3)
    assert found["lr"] == pytest.approx(5e-4)
    moved = max((value - before[name]).abs().max().item() for name, value in tiny.state_dict().items())
    assert moved == pytest.approx(5e-4, rel=1e-2)


def test_gradients_do_not_leak_into_the_next_step(tiny, samples, make_sample):
    fresh = copy.deepcopy(tiny)
    trainer = make_trainer(tiny, lr=0.0)
    trainer.train_step(batch_of(samples))
    trainer.train_step(batch_of([make_sample(9, 2)]))
    make_trainer(fresh, lr=0.0).train_step(batch_of([make_sample(9, 2)]))
    assert_same(gradients(tiny), gradients(fresh), 0.0)


def nothing(inputs):
    return LossOutputs(0.0 * inputs.trainer_logprobs.sum(), {})


def test_a_loss_gets_the_step_of_its_batch(tiny, samples):
    seen = set()

    def watching(inputs):
        seen.add((inputs.step, inputs.max_steps))
        return nothing(inputs)

    batch = batch_of(samples[:2])
    batch.step = 3
    make_trainer(tiny, rl_losses={"": watching}).train_step(batch)
    assert seen == {(3, 4)}


def test_the_entropy_of_one_env_is_rewarded_exactly_once(tiny, make_sample):
    """Against plain softmax in float64: mean entropy over all rl members of the step, in two of three envs' samples.

    The samples share a prompt, which runs once.
    """
    samples = [make_sample(12, 4, seed=0, loss=name) for name in ("", "bonus", "bonus")]
    for number, sample in enumerate(samples):
        sample.token_ids[-3:] = [48 + number] * 3
    reference = copy.deepcopy(tiny).double()
    entropies = [plain_logprobs(reference, sample)[1][3:] for sample in samples[1:]]
    (-0.3 * torch.cat(entropies).sum() / (3 * 8)).backward()
    bonus = functools.partial(default_loss, adv_tau=0.0, kl_tau=0.0, entropy_coef=0.3)
    metrics = make_trainer(tiny, rl_losses={"": nothing, "bonus": bonus}).train_step(batch_of(samples))
    assert_same(gradients(tiny), gradients(reference), 1e-4)
    assert metrics["loss/rl"] == pytest.approx(-0.3 * torch.cat(entropies).sum().item() / 24, rel=1e-4)
    assert metrics["samples/rl"] == 3.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"reference": INITIAL, "ref_kl_weights": [1.0] * 12},
            r"names the reference 'initial', which the trainer does not have: .*trainer_references\(\)",
        ),
    ],
)
def test_samples_that_need_what_is_missing_are_refused(tiny, make_sample, fields, message):
    """Before anything is trained."""
    before = copy.deepcopy(tiny.state_dict())
    with pytest.raises(ValueError, match=message):
        make_trainer(tiny).train_step(batch_of([make_sample(12, 3), make_sample(12, 3, **fields)]))
    assert all(torch.equal(value, before[name]) for name, value in tiny.state_dict().items())


@pytest.mark.slow
def test_two_threads_come_to_the_same_weights_each_time(tiny, make_sample):
    """Sums over tokens are long enough here to be divided among threads."""
    batch = batch_of([make_sample(24, 6, seed=seed) for seed in range(32)], seq_len=512)
    models = [copy.deepcopy(tiny) for _ in range(2)]
    torch.set_num_threads(2)
    try:
        for model in models:
            make_trainer(model, tokens_per_forward=512).train_step(batch)
    finally:
        torch.set_num_threads(1)
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
