"""Token export: each line against what was shipped and an independent forward pass."""

import copy
import json
import math
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import astuple

from prl.base import files
from prl.base.errors import PrlError
from prl.config.trainer import AdamWConfig
from prl.losses import LossOutputs, default_loss
from prl.rollouts.components import STREAM_FILL
from prl.rollouts.messages import Origin, StepBatch
from prl.rollouts.packing import pack
from prl.trainer.export import TokenExport, example_steps, first_groups
from prl.trainer.trainer import Trainer
from prl.trainer.worker import make_export


@pytest.fixture
def samples(make_sample):
    """Of each algorithm, two with a prompt in common, some tokens that do not train, and one with none that does."""
    mask = [place >= 4 for place in range(12)]
    zero, on = [0.0] * 12, [float(trains) for trains in mask]
    plain, other = make_sample(12, 4, seed=1), make_sample(10, 4, seed=1)
    plain.logprobs[6], plain.logprobs[1], plain.advantages[2] = -9999.0, math.nan, math.nan
    weighted = make_sample(12, 4, seed=2, rl_weights=[1.0] * 6 + [0.0, 0.5] * 3)
    echo = make_sample(12, 4, seed=3, ce_weights=[0.0, 0.1] * 3 + [0.0] * 6)
    sft = make_sample(12, 4, seed=4, advantages=None, rl_weights=zero, ce_weights=on)
    opd = make_sample(12, 4, seed=5, advantages=None, rl_weights=zero, ref_kl_weights=on, ref_logprobs=[-1.0] * 12)
    masked = make_sample(6, 6, seed=6, advantages=None)
    return [plain, other, weighted, echo, sft, opd, masked]


@torch.no_grad()
def policy_logprobs(model, ids, temperatures):
    """Of every token after the first; one sequence, float64."""
    logits = copy.deepcopy(model).double()(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
    logp = (logits / torch.tensor(temperatures[1:], dtype=torch.float64)[:, None]).log_softmax(-1)
    return [0.0, *logp.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1).tolist()]


def batch_of(samples, step=1):
    rows, truncated = pack(samples, 40, 1)
    assert truncated == 0
    return StepBatch(step, rows[0], 0)


def trainer_of(model, rl_loss=default_loss, *, share=True, folder=None, **how):
    return Trainer(
        model=model,
        rl_losses={"": rl_loss},
        max_steps=4,
        share_prefixes=share,
        tokens_per_forward=64,
        optim=AdamWConfig(lr=1e-4),
        export=folder and TokenExport(folder, 0, **how),
    )


def read(folder, step=1, rank=0):
    """The lines of a step, which are JSON without NaN."""

    def refuse(constant):
        raise AssertionError(constant)

    path = folder / "tokens" / files.step_name(step) / f"rank_{rank}.jsonl"
    return [SimpleNamespace(**json.loads(line, parse_constant=refuse)) for line in path.read_bytes().splitlines()]


def null(values):
    return None if values is None else [value if math.isfinite(value) else None for value in values]


def components_of(line, place):
    """The components that a token feeds, by what was shipped."""
    weights = {name: getattr(line, f"{name}_weights") for name in ("rl", "ce", "ref_kl")}
    weights["rl"] = (weights["rl"] or [1.0] * len(line.mask)) if line.mask[place] else None
    return [name for name, values in weights.items() if values and values[place]]


@pytest.mark.parametrize("share", [True, False])
def test_lines_hold_shipped_tokens_and_their_use(tiny, samples, tmp_path, share):
    trainer_of(copy.deepcopy(tiny), share=share, folder=tmp_path).train_step(batch_of(samples))
    lines = iter(read(tmp_path))
    for row in batch_of(samples).micro_batches:  # in the order they were shipped in
        for number, env in enumerate(row.env_names):
            part = slice(sum(row.sequence_lengths[:number]), sum(row.sequence_lengths[: number + 1]))
            line = next(lines)
            assert (line.step, line.rank, line.env, line.token_ids) == (1, 0, env, row.input_ids[part])
            assert line.mask == row.mask[part] and line.temperature == row.temperatures[part]
            assert line.inference_logprobs == null(row.logprobs[part])
            for name in STREAM_FILL:
                stream = getattr(row, name)
                assert getattr(line, name) == null(stream and stream[part]), name
            check_treatment(line, policy_logprobs(tiny, line.token_ids, line.temperature))
    assert next(lines, None) is None


def check_treatment(line, own):
    """Check the use, the logprob and the ratio of each token of a line by what was shipped and the policy's own."""
    for place, (use, logprob, ratio) in enumerate(zip(line.use, line.trainer_logprobs, line.ratio, strict=True)):
        components = components_of(line, place)
        if not components:
            assert (use, logprob, ratio) == ("weight 0" if line.mask[place] else "context", None, None)
            continue
        assert logprob == pytest.approx(own[place], rel=1e-4, abs=2e-5)
        if line.inference_logprobs[place] in (None, -9999.0) and components != ["ce"]:
            assert (use, ratio) == ("invalid logprob", None)
            continue
        assert [label.split()[0] for label in use.split("+")] == components
        if components == ["ce"]:
            assert ratio is None
        else:
            assert ratio == pytest.approx(math.exp(logprob - line.inference_logprobs[place]), rel=1e-5)


def squared(inputs):
    """A custom loss: one sequence at a time, no token terms."""
    return LossOutputs(loss=(inputs.trainer_logprobs[inputs.loss_mask] ** 2).sum(), metrics={})


@pytest.mark.parametrize("rl_loss", [default_loss, squared])
def test_training_is_bitwise_the_same(tiny, samples, tmp_path, rl_loss):
    found = []
    for folder in (None, tmp_path):
        model = copy.deepcopy(tiny)
        metrics = trainer_of(model, rl_loss, folder=folder).train_step(batch_of(samples))
        found.append((metrics, list(model.parameters())))
        assert list(tmp_path.iterdir()) == ([] if folder is None else [tmp_path / "tokens"])  # off writes nothing
    (metrics, weights), (metrics_on, weights_on) = found
    assert metrics == metrics_on
    for one, other in zip(weights, weights_on, strict=True):
        assert torch.equal(one, other) and torch.equal(one.grad, other.grad)


def test_each_step_has_its_own_file(tiny, samples, tmp_path):
    trainer = trainer_of(tiny, folder=tmp_path)
    trainer.train_step(batch_of(samples[:3]))
    trainer.train_step(batch_of(samples[6:], step=2))  # nothing to train
    trainer.train_step(batch_of([], step=3))  # a dummy
    assert [len(read(tmp_path, step)) for step in (1, 2, 3)] == [3, 1, 0]
    (line,) = read(tmp_path, 2)
    assert line.step == 2 and line.use == ["context"] * 6


def test_a_step_that_fails_is_written_all_the_same(tiny, samples, tmp_path):
    samples[0].advantages[5] = math.nan
    with pytest.raises(PrlError, match="gradient's norm"):
        trainer_of(tiny, folder=tmp_path).train_step(batch_of(samples[:1]))
    (line,) = read(tmp_path)
    assert line.advantages[5] is None and "rl kept" in line.use


def test_lines_name_their_rollout_and_spell_their_tokens(tiny, samples, tmp_path):
    samples[0].origin = Origin("t7", 3, 1, "asker")
    trainer = trainer_of(tiny, folder=tmp_path, decode=lambda token: f"<{token}>")
    trainer.train_step(batch_of(samples[:2]))
    named = {line.rollout: line for line in read(tmp_path)}
    assert (named[1].task, named[1].group, named[1].agent) == ("t7", 3, "asker")
    assert named[1].text == [f"<{token}>" for token in samples[0].token_ids]
    assert (named[None].task, named[None].group, named[None].agent) == (None, None, None)


def test_steps_of_examples_have_the_first_groups_alone(tiny, make_sample, tmp_path, monkeypatch):
    made = [make_sample(5 + place % 3, 4, seed=place % 3) for place in range(9)]  # of 5, 6 and 7 tokens
    for place, sample in enumerate(made):
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
            chosen = sorted((rows[number].origins[place] for number, place in first_groups(rows)), key=astuple)
            assert [(origin.group, origin.rollout) for origin in chosen] == every[:count]


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
