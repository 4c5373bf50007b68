"""The reference in the trainer, after the policy has moved: against forward passes of its own and float64 gradients."""

import copy
import functools
import json
import math

import pytest
import torch

from prl.orchestrator.packing import pack
from prl.trainer.config import AdamWConfig
from prl.trainer.export import TokenExport
from prl.trainer.loss import default_loss
from prl.trainer.trainer import Trainer
from prl.trainer.worker import make_trainer
from prl.wire.messages import StepBatch

COEF, KL_TAU, REF_TAU = 0.4, 0.01, 1e-3


@pytest.fixture
def moved(tiny):
    """The policy some updates later."""
    model, generator = copy.deepcopy(tiny), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture
def samples(make_sample):
    """Of grpo with the initial model as the reference (a prompt in common, another temperature), of opd, of grpo with
    a frozen reference, and of plain grpo."""

    def pulled(length, prompt, seed, **streams):
        weights = [COEF * (i >= prompt) for i in range(length)]
        return make_sample(length, prompt, seed, ref_kl_weights=weights, **streams)

    own = [pulled(14 + i, 4, seed=3, initial_reference=True) for i in range(3)]
    brought = [-0.1 * i for i in range(12)]
    opd = make_sample(12, 4, seed=5, advantages=None, rl_weights=[0.0] * 12, ref_logprobs=brought)
    opd.ref_kl_weights = [0.0] * 4 + [1.0] * 8
    return [*own, opd, pulled(12, 3, seed=6, ref_logprobs=brought), make_sample(9, 2, seed=7)]


def trainer_of(model, reference, **settings):
    return Trainer(
        **{"tokens_per_forward": 64, "optim": AdamWConfig(lr=1e-3)} | settings,
        model=model,
        rl_losses={"": functools.partial(default_loss, kl_tau=KL_TAU)},
        max_steps=9,
        head_chunk=7,
        max_grad_norm=1e9,
        reference=None if reference is None else lambda: copy.deepcopy(reference),
    )


def batch_of(samples, step=1):
    return StepBatch(step, pack(samples, 40, 1)[0][0], 0)


def logprobs_of(model, sample):
    """Of each token, by a forward pass of the sequence alone; the first has none."""
    ids = torch.tensor(sample.token_ids)
    temperatures = torch.tensor(sample.temperatures[1:], dtype=torch.float64)[:, None]
    logp = (model(input_ids=ids[None], use_cache=False).logits[0, :-1].double() / temperatures).log_softmax(-1)
    return torch.cat([torch.zeros(1, dtype=torch.float64), logp.gather(1, ids[1:, None]).squeeze(1)])


def written_out(policy, initial, samples):
    """The loss, its gradients by name and the mean k, one token at a time in float64."""
    policy, initial = copy.deepcopy(policy).double(), copy.deepcopy(initial).double()
    terms, ks = {"rl": [], "ref_kl": []}, []
    for sample in samples:
        t = logprobs_of(policy, sample)
        ref = logprobs_of(initial, sample).tolist() if sample.initial_reference else sample.ref_logprobs
        per_sequence = []
        for place in (place for place, on in enumerate(sample.mask) if on):
            i, d = sample.logprobs[place], t[place].exp().item() - math.exp(sample.logprobs[place])
            rho, gap = (t[place] - i).exp(), (t[place] - i) ** 2
            if sample.advantages is not None:
                a = sample.advantages[place]
                terms["rl"].append(KL_TAU * gap - a * rho * ((d <= 0.2) if a > 0 else (d >= -0.2)))
            if sample.ref_kl_weights is not None:
                k = ref[place] - t[place].item()
                per_sequence.append(k)
                terms["ref_kl"].append(sample.ref_kl_weights[place] * (REF_TAU * gap - k * rho * (d >= -0.2)))
        ks += [sum(per_sequence) / len(per_sequence)] if per_sequence else []
    loss = sum(sum(part) / len(part) for part in terms.values())
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in policy.named_parameters()}
    return loss.item(), gradients, sum(ks) / len(ks)


@pytest.mark.parametrize(("share", "tokens"), [(True, 100), (False, 30)])
def test_the_gradient_is_that_of_the_formula_with_each_tokens_own_reference(tiny, moved, samples, share, tokens):
    loss, gradients, k = written_out(moved, tiny, samples)
    batch = batch_of(samples)
    mixed = [row.initial_reference for row in batch.micro_batches]
    assert any(len(set(flags)) == 2 for flags in mixed), "no row has both sources"
    found = trainer_of(moved, tiny, share_prefixes=share, tokens_per_forward=tokens).train_step(batch)
    assert found["loss/mean"] == pytest.approx(loss, rel=1e-4)
    assert found["ref_kl"] == pytest.approx(k, rel=1e-4) and abs(k) > 0.05
    for name, parameter in moved.named_parameters():
        gap = (parameter.grad.double() - gradients[name]).norm().item()
        assert gap <= 2e-4 * gradients[name].norm().item() + 1e-9, name


def test_its_logprobs_are_those_of_the_initial_weights_and_stay_so(tiny, samples, tmp_path):
    """Three updates on; the export shows what the loss was given."""
    initial = copy.deepcopy(tiny)
    trainer = trainer_of(tiny, tiny, export=TokenExport(tmp_path, 0))
    for step in (1, 2, 3):
        found = trainer.train_step(batch_of(samples[:3], step))
        assert (abs(found["ref_kl"]) < 1e-6) == (step == 1)
    lines = [json.loads(line) for line in (tmp_path / "tokens/step_000003/rank_0.jsonl").read_text().splitlines()]
    for line in lines:
        (sample,) = [sample for sample in samples[:3] if sample.token_ids == line["token_ids"]]
        expected, since = (logprobs_of(copy.deepcopy(model).double(), sample).tolist() for model in (initial, tiny))
        assert line["ref_logprobs"][4:] == pytest.approx(expected[4:], abs=2e-5)
        assert line["ref_logprobs"][4:] != pytest.approx(since[4:], abs=1e-2), "the policy has moved"
    for one, other in zip(trainer.reference.parameters(), initial.parameters(), strict=True):
        assert torch.equal(one, other) and one.grad is None


@pytest.mark.parametrize("number", ["float32", "bfloat16 weights", "bfloat16 over float32 weights"])
def test_in_any_number_format_the_kl_is_zero_until_the_policy_moves(request, tiny, samples, number):
    """Both go through the same layers, so that rounding is the same; against float32 it is not."""
    model = tiny.bfloat16() if number == "bfloat16 weights" else tiny
    half = number == "bfloat16 over float32 weights"
    if half:
        request.getfixturevalue("a_rank")
    reference = copy.deepcopy(model)
    trainer = trainer_of(model, reference, half=half)
    assert abs(trainer.train_step(batch_of(samples[:3]))["ref_kl"]) < 1e-6
    assert abs(trainer.train_step(batch_of(samples[:3]))["ref_kl"]) > 1e-3


def test_without_a_reference_the_sample_is_refused_before_anything_is_trained(tiny, samples):
    trainer, before = trainer_of(tiny, None), copy.deepcopy(tiny.state_dict())
    with pytest.raises(ValueError, match=r"the trainer holds none: set algo\.kl\.coef, or score .* as opd and opsd do"):
        trainer.train_step(batch_of(samples))
    assert all(torch.equal(value, before[name]) for name, value in tiny.state_dict().items())


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8.0, "target_modules": None}], ids=["weights", "adapters"])
@pytest.mark.parametrize("asked", [True, False])
def test_the_process_loads_it_where_it_is_asked_for(tiny, tiny_path, asked, lora):
    config = {
        "model": {"path": tiny_path, "dtype": "float32", "trust_remote_code": False, "lora": lora},
        "losses": {"": {"_target_": "prl.trainer.loss.default_loss", "_partial_": True}},
        "trainer": {"_target_": "prl.trainer.trainer.Trainer", "device": "cpu"},
        "seed": 0,
        "max_steps": 1,
        "initial_reference": asked,
    }
    trainer = make_trainer(config, torch.device("cpu"))
    assert (trainer.reference is not None) == asked
    for one, other in zip(trainer.reference.parameters() if asked else (), tiny.parameters(), strict=asked):
        assert torch.equal(one, other) and not one.requires_grad
