"""Several optimiser steps on a batch, means over rollouts, and entropy bonuses with a target."""

import copy
import functools

import pytest
import torch

from prl.base.errors import PrlError
from prl.config.trainer import AdamWConfig
from prl.losses import LossCounts, compute_loss, count_members, default_loss, ppo_loss, reinforce_loss
from prl.rollouts.messages import Origin, StepBatch
from prl.rollouts.packing import pack
from prl.trainer.batch import stacks
from prl.trainer.entropy import EntropyControl
from prl.trainer.export import TokenExport
from prl.trainer.trainer import Trainer

CPU = torch.device("cpu")


@pytest.fixture
def groups(make_sample):
    """Four groups of two rollouts; the first rollout of each has two samples."""

    def sample(group, number):
        length = 8 + 3 * group + number
        return make_sample(length, 3, 3 * group + number, origin=Origin(group, group, number // 2, "agent"))

    return [[sample(group, number) for number in range(3)] for group in range(4)]


def make_trainer(model, loss=default_loss, **options):
    return Trainer(model=model, rl_losses={"": loss}, max_steps=4, optim=AdamWConfig(lr=1e-3), **options)


def batch_of(groups, updates=1, step=1):
    rows, _ = pack([sample for group in groups for sample in group], 32, 1, updates)
    return StepBatch(step, rows[0], 0)


def parts_of(batch):
    """The groups of each update."""
    return [
        {origin.group for row in batch.micro_batches if row.update == update for origin in row.origins}
        for update in sorted({row.update for row in batch.micro_batches})
    ]


def test_updates_are_the_steps_of_their_groups(tiny, groups):
    """Bit for bit, twice over two parts: their own counts, one learning rate, and means over all four."""
    one, other = make_trainer(tiny, epochs=2), make_trainer(copy.deepcopy(tiny))
    batch = batch_of(groups, updates=2)
    parts = parts_of(batch)
    assert parts == [{0, 3}, {1, 2}] and len(batch.micro_batches) > 4, "as many tokens, longest groups first"
    found = one.train_step(batch)
    expected = [other.train_step(batch_of([groups[number] for number in part])) for part in [*parts, *parts]]
    for name, weight in other.model.state_dict().items():
        assert torch.equal(one.model.state_dict()[name], weight), name
    assert (
        found["updates"] == 4
        and found["lr"] == expected[0]["lr"]
        and found["tokens/rl"] == sum(line["tokens/rl"] for line in expected)
    )
    assert found["grad_norm"] == pytest.approx(sum(line["grad_norm"] for line in expected) / 4)
    terms = [line["loss/rl"] * line["tokens/rl"] for line in expected]
    assert found["logprob_gap/mean"] == expected[0]["logprob_gap/mean"], "the sampler's weights are those before"
    assert found["loss/rl"] == pytest.approx(sum(terms) / found["tokens/rl"])


def test_proximal_logprobs_are_those_before_the_first_update(tiny, groups):
    """As if the sampler had given them, at each of the four updates."""
    before, own = copy.deepcopy(tiny), copy.deepcopy(tiny)
    found = make_trainer(tiny, functools.partial(ppo_loss, proximal=True), epochs=2)
    found.train_step(batch_of(groups, updates=2))
    plain = make_trainer(own, ppo_loss, epochs=2)
    for sample in (sample for group in groups for sample in group):
        logits = own(input_ids=torch.tensor([sample.token_ids])).logits[0, :-1]
        logprobs = (logits / torch.tensor(sample.temperatures[1:])[:, None]).log_softmax(-1)
        sampled = logprobs.gather(1, torch.tensor(sample.token_ids[1:])[:, None]).squeeze(1).tolist()
        sample.logprobs = [0.0, *sampled]
    line = plain.train_step(batch_of(groups, updates=2))
    assert line["importance_ratio"] != 1.0, "later updates see other weights"
    start, expected, weights = (torch.cat([p.flatten() for p in m.parameters()]) for m in (before, own, found.model))
    assert (weights - expected).norm() < 1e-2 * (expected - start).norm()


def test_the_export_has_every_sequence_of_several_updates_once(tiny, groups, tmp_path):
    make_trainer(tiny, epochs=2, export=TokenExport(tmp_path, 0)).train_step(batch_of(groups, updates=2))
    lines = (tmp_path / "tokens/step_000001/rank_0.jsonl").read_text().splitlines()
    assert len(lines) == 12 and all('"rl kept"' in line for line in lines)


def test_weights_between_updates_are_of_no_step(tiny, groups):
    """A run does not save them as those of the step before."""
    trainer = make_trainer(tiny)
    batch = batch_of(groups, updates=2)
    trainer.train_step(batch)
    assert not trainer.between_updates
    batch.micro_batches[-1].advantages = [float("inf")] * 32
    with pytest.raises(PrlError, match="gradient's norm"):
        trainer.train_step(batch)
    assert trainer.between_updates


# --- rollout_mean


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("updates", [1, 3])
def test_each_rollout_counts_alike(groups, ranks, updates):
    """Over rows and ranks, with a token without a measured logprob, one of weight 0 and one that is cut off."""
    samples = [sample for group in groups for sample in group]
    samples[0].logprobs[5] = float("nan")
    samples[1].rl_weights = [0.0] + [2.0] * 7 + [0.0] * (len(samples[1].token_ids) - 8)
    samples[3].mask = [False] * len(samples[3].mask)  # its rollout has one sample left
    packed, _ = pack(samples, 18, ranks, updates)
    rows = [row for of_rank in packed for row in of_rank]
    for update in {row.update for row in rows}:
        own = list(stacks([row for row in rows if row.update == update], 40, CPU))
        fixed = [(stack, {"loss_mask": stack.mask, "sequence_lengths": stack.sequence_lengths}) for stack in own]
        counts = sum(count_members(inference_logprobs=s.logprobs, **given, **s.streams) for s, given in fixed)
        found = sum(
            compute_loss(
                trainer_logprobs=stack.logprobs.nan_to_num(-1.0).requires_grad_(),
                inference_logprobs=stack.logprobs,
                counts=LossCounts.from_tensor(counts),
                rl_loss=functools.partial(reinforce_loss, agg_mode="rollout_mean"),
                **given,
                **stack.streams,
            )[0].item()
            for stack, given in fixed
        )
        groups_of_update = {origin.group for row in rows if row.update == update for origin in row.origins}
        assert found == pytest.approx(mean_over_rollouts(samples, groups_of_update), rel=1e-6)


def mean_over_rollouts(samples, groups):
    """-A t, averaged in each rollout, then over rollouts."""
    rollouts = {}
    for sample in samples:
        weights = sample.rl_weights or [1.0] * len(sample.mask)
        tokens = zip(sample.mask[:18], weights, sample.logprobs, sample.advantages, strict=False)
        terms = [-w * a * t for on, w, t, a in tokens if on and w and t == t]
        if terms and sample.origin.group in groups:
            rollouts.setdefault((sample.origin.group, sample.origin.rollout), []).extend(terms)
    return sum(sum(terms) / len(terms) for terms in rollouts.values()) / len(rollouts)


# --- entropy_target


def test_a_control_raises_and_lowers_the_coefficient():
    control = EntropyControl(target=1.0, step=0.25, coef=0.5)
    seen = []
    for entropy in (0.9, 0.8, 1.2, 1.1, 1.0, 1.3, 1.4, 0.5):
        control.update(entropy)
        seen.append((control.coef, control.applied))
    assert seen == [(0.75, 0.75), (1.0, 1.0), (0.75, 0), (0.5, 0), (0.25, 0), (0.0, 0), (0.0, 0), (0.25, 0.25)]


def test_entropy_is_that_of_the_tokens_of_the_loss(tiny, groups):
    """Group 0 has a loss of its own, with a target; weights leave out tokens, and others have another loss."""
    adaptive = functools.partial(default_loss, entropy_coef=0.0, entropy_target=9.0, entropy_step=0.05)
    for sample in groups[0]:
        sample.loss = "a"
        sample.rl_weights = [float(place % 2) for place in range(len(sample.token_ids))]
    losses = {"": default_loss, "a": adaptive}
    trainer = Trainer(model=copy.deepcopy(tiny), rl_losses=losses, max_steps=4, optim=AdamWConfig(lr=1e-3))
    line = trainer.train_step(batch_of(groups))
    found = []
    with torch.no_grad():
        for sample in groups[0]:
            logits = tiny(torch.tensor([sample.token_ids])).logits[0, :-1].double()
            logits /= torch.tensor(sample.temperatures[1:])[:, None]
            entropy = torch.distributions.Categorical(logits=logits).entropy()
            on = [bool(m and w) for m, w in zip(sample.mask[1:], sample.rl_weights[1:], strict=True)]
            found += entropy[torch.tensor(on)].tolist()
    assert line["entropy_rl/a"] == pytest.approx(sum(found) / len(found), abs=1e-5)
    assert abs(line["entropy_rl/a"] - line["entropy/all/mean"]) > 1e-3


def test_entropy_is_held_at_its_target(tiny, groups):
    """Without a target it is elsewhere; the coefficient of a step is a metric."""
    adaptive = functools.partial(default_loss, entropy_coef=0.0, entropy_target=4.0, entropy_step=0.05)
    free, steered = make_trainer(copy.deepcopy(tiny)), make_trainer(tiny, adaptive)
    lines = [[trainer.train_step(batch_of(groups)) for _ in range(30)] for trainer in (free, steered)]
    last_free, last = (sum(line["entropy/all/mean"] for line in of_one[-10:]) / 10 for of_one in lines)
    assert last_free < 3.0 < 3.7 < last < 4.3
    coefficients = [line["entropy_coef/all"] for line in lines[1]]
    assert coefficients[:2] == [0.0, 0.05] and "entropy_coef/all" not in lines[0][0]
