"""Token export: each line against what was shipped, an independent forward pass, and what the loss reports."""

import copy
import functools
import json
import math
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import astuple

from prl.errors import PrlError
from prl.orchestrator.packing import pack
from prl.trainer.config import AdamWConfig
from prl.trainer.export import TokenExport, example_steps, first_groups
from prl.trainer.loss import LossOutputs, aipo_loss, default_loss
from prl.trainer.trainer import Trainer
from prl.trainer.worker import make_export
from prl.wire import files
from prl.wire.messages import STREAM_FILL, Origin, StepBatch, TrainingSample

NAN, INF = float("nan"), float("inf")
FAR, NEAR, SURE = "far", "near", "sure"  # the sampler: much less sure than the policy, about as sure, surer

# Of a token: whether the policy likes it, the sampler's logprob, A, mask, the weights of rl, ce and ref_kl; its fate.
TOKENS = {
    "kept": (True, NEAR, 1.0, True, 1, 0, 0, "rl kept"),
    "high": (True, FAR, 1.0, True, 1, 0, 0, "rl dropped"),
    "high, A<0": (True, FAR, -1.0, True, 1, 0, 0, "rl clipped"),
    "low": (False, SURE, -1.0, True, 1, 0, 0, "rl dropped"),
    "low, A>0": (False, SURE, 1.0, True, 1, 0, 0, "rl kept"),
    "nan": (True, NAN, 1.0, True, 1, 0, 0, "invalid logprob"),
    "-inf": (True, -INF, 1.0, True, 1, 0, 0, "invalid logprob"),
    "sentinel": (True, -9999.0, 1.0, True, 1, 0, 0, "invalid logprob"),
    "off": (True, 0.0, 0.0, False, 1, 0, 0, "context"),
    "off, nan": (True, NAN, NAN, False, 1, 0, 0, "context"),
    "zero": (True, NEAR, 1.0, True, 0, 0, 0, "weight 0"),
    "zero, nan": (True, NAN, 1.0, True, 0, 0, 0, "weight 0"),
    "half": (True, NEAR, 1.0, True, 0.5, 0, 0, "rl kept"),
    "echo": (True, 0.0, 0.0, False, 1, 0.1, 0, "ce"),
    "echo, nan": (True, NAN, 0.0, False, 1, 0.1, 0, "ce"),
    "sft": (True, 0.0, 0.0, True, 0, 1, 0, "ce"),
    "opd": (True, NEAR, 0.0, True, 0, 0, 1, "ref_kl kept"),
    "opd, high": (True, FAR, 0.0, True, 0, 0, 1, "ref_kl kept"),
    "opd, low": (False, SURE, 0.0, True, 0, 0, 1, "ref_kl dropped"),
    "opd, off": (False, SURE, 0.0, False, 0, 0, 1, "ref_kl dropped"),
    "opd, nan": (True, NAN, 0.0, True, 0, 0, 1, "invalid logprob"),
    "rl and ce": (True, NEAR, 1.0, True, 1, 0.3, 0, "rl kept+ce"),
    "high and ce": (True, FAR, 1.0, True, 1, 0.3, 0, "rl dropped+ce"),
    "nan and ce": (True, NAN, 1.0, True, 1, 0.3, 0, "ce+invalid logprob"),
    "rl and opd": (False, SURE, 1.0, True, 1, 0, 0.7, "rl kept+ref_kl dropped"),
    "rl, opd, nan": (True, NAN, 1.0, True, 1, 0, 0.7, "invalid logprob"),
    "all": (True, NEAR, 1.0, True, 1, 1, 1, "rl kept+ce+ref_kl kept"),
}


@torch.no_grad()
def grow(model, prompt, likes):
    """Tokens after `prompt`: the likeliest, or the one after it."""
    ids = list(prompt)
    for like in likes:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids.append(int(logits.topk(2).indices[0 if like else 1]))
    return ids


@torch.no_grad()
def policy_logprobs(model, ids, temperatures):
    """Of every token after the first; one sequence, float64."""
    logits = copy.deepcopy(model).double()(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
    logp = (logits / torch.tensor(temperatures[1:], dtype=torch.float64)[:, None]).log_softmax(-1)
    return [0.0, *logp.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1).tolist()]


def make(model, env, prompt, plan, streams):
    """A sample whose completion is `plan`, names in `TOKENS`, and the fate of each of its tokens."""
    rows = [TOKENS["off"]] * len(prompt) + [TOKENS[name] for name in plan]
    likes, sampler, advantages, mask, rl, ce, ref_kl, fate = map(list, zip(*rows, strict=True))
    ids = grow(model, prompt, likes[len(prompt) :])
    temperatures = [0.1 if i % 2 else 0.15 for i in range(len(ids))]  # so that there is something to like
    own = policy_logprobs(model, ids, temperatures)
    moves = [math.exp(t) * (1 - math.exp(-3)) if k is FAR else 0.9 - math.exp(t) for t, k in zip(own, sampler)]
    assert all(move > 0.25 for move, kind in zip(moves, sampler) if kind in (FAR, SURE)), "too near the trust region"
    logprobs = [{FAR: t - 3.0, NEAR: t - 0.05, SURE: math.log(0.9)}.get(k, k) for t, k in zip(own, sampler)]
    columns = {
        "advantages": advantages,
        "rl_weights": [float(w) for w in rl],
        "ce_weights": [float(w) for w in ce],
        "ref_kl_weights": [float(w) for w in ref_kl],
        "ref_logprobs": [x - 0.2 for x in own],
    }
    sample = TrainingSample(
        token_ids=ids,
        mask=mask,
        logprobs=logprobs,
        temperatures=temperatures,
        env_name=env,
        reward=0.5,
        **{name: columns[name] for name in streams},
    )
    return sample, fate


@pytest.fixture(scope="module")
def _made(_loaded):
    """Samples with their fates: each algorithm alone, all at once, groups with a prompt in common, none to train."""
    plain = ["kept", "high", "high, A<0", "nan", "off", "off, nan", "sentinel", "-inf", "low", "low, A>0"]
    one, two = [17, 11, 18, 29], [23, 10, 19, 29]
    rl = ["advantages"]
    opd = ["rl_weights", "ref_logprobs", "ref_kl_weights"]
    weights = [name for name in STREAM_FILL if name not in ("advantages", "ref_logprobs")]
    made = [
        ("grpo", one, plain, rl),
        ("grpo", one, ["kept"] * 3, rl),
        ("grpo", one, ["high"] * 4 + ["off"], rl),
        ("grpo", one, ["low"], rl),
        ("weighted", two, ["zero", "half", "zero, nan", "kept"], ["advantages", "rl_weights"]),
        ("echo", two, ["kept", "echo", "echo, nan", "off", "kept"], ["advantages", "ce_weights"]),
        ("sft", one, ["sft"] * 6, ["rl_weights", "ce_weights"]),
        ("opd", two, ["opd", "opd, high", "opd, nan", "opd, low", "opd, off"], opd),
        ("mixed", two, list(TOKENS), list(STREAM_FILL)),
        ("mixed", one, ["rl and ce", "all", "rl, opd, nan", "rl and opd"], list(STREAM_FILL)),
        ("zero", two, ["zero", "off", "zero, nan"], weights),
        ("masked", one, ["off", "off, nan"], rl),
        ("unusable", one, ["nan"] * 3, rl),
    ]
    return [make(_loaded, *arguments) for arguments in made]


@pytest.fixture
def cases(_made):
    """A test's own copy of them."""
    return copy.deepcopy(_made)


def batch_of(cases, step=1, seq_len=40):
    rows, truncated = pack([sample for sample, _ in cases], seq_len, 1)
    assert truncated == 0
    return StepBatch(step, rows[0], 0)


def trainer_of(model, rl_loss=default_loss, *, share=True, tokens=64, folder=None, **how):
    return Trainer(
        model=model,
        rl_losses=rl_loss if isinstance(rl_loss, dict) else {"": rl_loss},
        max_steps=4,
        share_prefixes=share,
        tokens_per_forward=tokens,
        optim=AdamWConfig(lr=1e-4),
        export=folder and TokenExport(folder, 0, **how),
    )


def read(folder, step=1, rank=0):
    path = folder / "tokens" / files.step_name(step) / f"rank_{rank}.jsonl"
    return [SimpleNamespace(**json.loads(line)) for line in path.read_bytes().splitlines()]


def export(model, cases, folder, **kwargs):
    """The lines of a step, and its metrics. `model` stays as it is."""
    metrics = trainer_of(copy.deepcopy(model), folder=folder, **kwargs).train_step(batch_of(cases))
    return read(folder), metrics


def null(values):
    return None if values is None else [value if math.isfinite(value) else None for value in values]


LAYOUTS = [(True, 64), (True, 10_000), (False, 64)]


def test_the_cases_have_every_fate(cases):
    assert {fate for _, fates in cases for fate in fates} == {row[-1] for row in TOKENS.values()}
    assert len(batch_of(cases).micro_batches) > 2


@pytest.mark.parametrize("share, tokens", LAYOUTS)
def test_fates_and_what_was_shipped(tiny, cases, tmp_path, share, tokens):
    lines, _ = export(tiny, cases, tmp_path, share=share, tokens=tokens)
    rows = batch_of(cases).micro_batches
    fates = {(sample.env_name, tuple(sample.token_ids)): fate for sample, fate in cases}
    assert len(fates) == len(cases) == len(lines)
    expected = [
        (row, slice(sum(row.sequence_lengths[:i]), sum(row.sequence_lengths[: i + 1])), env)
        for row in rows
        for i, env in enumerate(row.env_names)
    ]
    for line, (row, part, env) in zip(lines, expected, strict=True):  # in the order they were shipped in
        assert (line.step, line.rank, line.env, line.token_ids) == (1, 0, env, row.input_ids[part])
        assert line.mask == row.mask[part] and line.temperature == row.temperatures[part]
        assert line.inference_logprobs == null(row.logprobs[part])
        for name in STREAM_FILL:
            stream = getattr(row, name)
            assert getattr(line, name) == null(stream and stream[part]), name
        assert line.fate == fates.pop((env, tuple(line.token_ids)))
    assert not fates


@pytest.mark.parametrize("share, tokens", LAYOUTS)
def test_numbers_are_those_of_an_independent_forward(tiny, cases, tmp_path, share, tokens):
    lines, _ = export(tiny, cases, tmp_path, share=share, tokens=tokens)
    for line in lines:
        own = policy_logprobs(tiny, line.token_ids, line.temperature)
        rl, ce, ref_kl = (getattr(line, f"{name}_weights") for name in ("rl", "ce", "ref_kl"))
        for i, fate in enumerate(line.fate):
            wanted = bool((line.mask[i] and (rl is None or rl[i])) or (ce and ce[i]) or (ref_kl and ref_kl[i]))
            assert (line.trainer_logprobs[i] is not None) == wanted == (fate not in ("context", "weight 0"))
            if wanted:
                assert line.trainer_logprobs[i] == pytest.approx(own[i], rel=1e-4, abs=2e-5)
            sampled = "rl " in fate or "ref_kl " in fate
            assert (line.ratio[i] is not None) == sampled
            if sampled:
                assert line.ratio[i] == pytest.approx(
                    math.exp(line.trainer_logprobs[i] - line.inference_logprobs[i]), rel=1e-5
                )


def test_the_file_is_json_without_nan(tiny, cases, tmp_path):
    lines, _ = export(tiny, cases, tmp_path)

    def refuse(constant):
        raise AssertionError(constant)

    text = (tmp_path / "tokens" / "step_000001" / "rank_0.jsonl").read_text()
    parsed = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    assert parsed == [vars(line) for line in lines]
    names = "step rank env task group rollout agent text token_ids mask temperature inference_logprobs trainer_logprobs"
    streams = {"advantages", "ref_logprobs", "rl_weights", "ce_weights", "ref_kl_weights"}
    assert set(parsed[0]) == {*names.split(), *streams, "ratio", "fate", "versions"}
    assert all(len(v) == len(p["token_ids"]) for p in parsed for v in p.values() if isinstance(v, list))
    assert [p.name for p in (tmp_path / "tokens" / "step_000001").iterdir()] == ["rank_0.jsonl"]  # nothing half done


def squared(inputs):
    """A custom loss: one sequence at a time, no token terms."""
    return LossOutputs(loss=(inputs.trainer_logprobs[inputs.loss_mask] ** 2).sum(), metrics={})


def test_fates_under_other_losses(tiny, cases, tmp_path):
    """`high` has a ratio of exp(3), `kept` of exp(0.05)."""
    losses = {
        "aipo": (functools.partial(aipo_loss, delta=8.0), ["rl kept", "rl clipped", "rl clipped"]),
        "delta": (functools.partial(default_loss, delta=8.0), ["rl kept", "rl dropped", "rl clipped"]),
        "no mask": (functools.partial(default_loss, dppo_mask_high=1.0, delta=None), ["rl kept"] * 3),
        "custom": (squared, ["rl"] * 3),
    }
    for name, (rl_loss, expected) in losses.items():
        lines, _ = export(tiny, cases, tmp_path / name, rl_loss=rl_loss)
        (line,) = (line for line in lines if line.env == "grpo" and line.token_ids == cases[0][0].token_ids)
        assert line.fate[:8] == ["context"] * 4 + expected + ["invalid logprob"], name
        assert line.ratio[5] == pytest.approx(math.exp(3), rel=1e-3)
        (sft,) = (line for line in lines if line.env == "sft")
        assert sft.fate == ["context"] * 4 + ["ce"] * 6


@pytest.mark.parametrize("rl_loss", [default_loss, squared])
def test_training_is_bitwise_the_same(tiny, cases, tmp_path, rl_loss):
    found = []
    for folder in (None, tmp_path):
        model = copy.deepcopy(tiny)
        metrics = trainer_of(model, rl_loss, folder=folder).train_step(batch_of(cases))
        found.append((metrics, {name: (p.detach(), p.grad) for name, p in model.named_parameters()}))
        assert list(tmp_path.iterdir()) == ([] if folder is None else [tmp_path / "tokens"])  # off writes nothing
    (metrics, weights), (metrics_on, weights_on) = found
    assert metrics == metrics_on
    for name, (value, gradient) in weights.items():
        assert torch.equal(value, weights_on[name][0]) and torch.equal(gradient, weights_on[name][1]), name


def test_each_step_has_its_own_file(tiny, cases, tmp_path):
    trainer = trainer_of(tiny, folder=tmp_path)
    trainer.train_step(batch_of(cases[:4]))
    trainer.train_step(batch_of(cases[9:12], step=2))
    trainer.train_step(batch_of([], step=3))  # a dummy
    assert [line.env for line in read(tmp_path, 1)] == ["grpo"] * 4
    assert sorted(line.env for line in read(tmp_path, 2)) == ["masked", "mixed", "zero"]
    assert {line.step for line in read(tmp_path, 2)} == {2}
    assert read(tmp_path, 3) == []


def test_a_step_without_anything_to_train_has_lines(tiny, cases, tmp_path):
    for share in (True, False):
        lines, metrics = export(tiny, cases[10:12], tmp_path, share=share)
        assert {fate for line in lines for fate in line.fate} == {"context", "weight 0"}
        assert all(value is None for line in lines for value in line.trainer_logprobs + line.ratio)
        assert [metrics[f"tokens/{name}"] for name in ("rl", "ce", "ref_kl")] == [0.0, 0.0, 0.0]


def test_a_step_that_fails_is_written_all_the_same(tiny, cases, tmp_path):
    sample, fate = cases[1]
    sample.advantages[5] = NAN
    with pytest.raises(PrlError, match="gradient's norm"):
        trainer_of(tiny, folder=tmp_path).train_step(batch_of([(sample, fate)]))
    (line,) = read(tmp_path)
    assert line.advantages[5] is None and line.fate == fate


def test_lines_name_their_rollout_and_spell_their_tokens(tiny, cases, tmp_path):
    cases[0][0].origin = Origin("t7", 3, 1, "asker")
    trainer = trainer_of(tiny, folder=tmp_path, decode=lambda token: f"<{token}>")
    trainer.train_step(batch_of(cases[:2]))
    named = {line.rollout: line for line in read(tmp_path)}
    assert (named[1].task, named[1].group, named[1].agent) == ("t7", 3, "asker")
    assert named[1].text == [f"<{token}>" for token in cases[0][0].token_ids]
    assert (named[None].task, named[None].group, named[None].agent) == (None, None, None)


def test_steps_of_examples_have_the_first_groups_alone(tiny, cases, tmp_path, monkeypatch):
    plan = [("grpo", [17, 11, 18, 29], ["kept"] * (1 + i % 3), ["advantages"]) for i in range(9)]
    made = [make(tiny, *arguments) for arguments in plan]  # of 5, 6 and 7 tokens
    for place, (sample, _) in enumerate(made):
        sample.origin = Origin(0, 10 - place // 2, place % 2, "agent")  # the last group began first
    trainer = trainer_of(tiny, folder=tmp_path, examples={2})
    for step in (1, 2, 3):
        trainer.train_step(batch_of(made, step=step))
    assert [path.name for path in (tmp_path / "tokens").iterdir()] == ["step_000002"]
    every = [(6, 0), (7, 0), (7, 1), (8, 0), (8, 1), (9, 0), (9, 1), (10, 0), (10, 1)]
    assert sorted((line.group, line.rollout) for line in read(tmp_path, 2)) == every
    rows = batch_of(made).micro_batches
    for name, most, count in (("EXAMPLES", 3, 3), ("EXAMPLE_TOKENS", 18, 3), ("EXAMPLE_TOKENS", 17, 2)):
        with monkeypatch.context() as patch:  # the groups that began first have samples of 7, then of 5 and 6 tokens
            patch.setattr(f"prl.trainer.export.{name}", most)
            found = sorted((rows[number].origins[place] for number, place in first_groups(rows)), key=astuple)
            assert [(origin.group, origin.rollout) for origin in found] == every[:count]


@pytest.mark.parametrize(
    ("count", "max_steps", "expected"),
    [(0, 60, set()), (1, 60, {1}), (3, 60, {1, 30, 60}), (8, 3, {1, 2, 3}), (4, 1, {1}), (3, 5, {1, 3, 5})],
)
def test_example_steps_go_from_the_first_to_the_last(count, max_steps, expected):
    assert example_steps(count, max_steps) == expected


@pytest.mark.parametrize(
    ("options", "examples"),
    [
        ({}, example_steps(8, 60)),
        ({"example_steps": 3}, {1, 30, 60}),
        ({"token_export": True, "example_steps": 3}, None),
    ],
)
def test_the_process_writes_what_its_options_ask_for(tiny_path, tmp_path, options, examples):
    model = {"path": tiny_path, "trust_remote_code": False}
    export = make_export({"model": model, "max_steps": 60, "trainer": options}, tmp_path, 1)
    assert (export.examples, export.rank) == (examples, 1) and export.decode(49) == "R"


def test_nothing_is_written_where_no_step_is_asked_for(tmp_path):
    assert make_export({"max_steps": 60, "trainer": {"example_steps": 0}}, tmp_path, 0) is None
