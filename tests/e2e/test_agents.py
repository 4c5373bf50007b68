"""Conversations, tools and games train for real, and so does the choice of what to learn from."""

import statistics
from collections import Counter

import pytest

from prl.envs.tasksets.calculator import compute

QUIET = "orchestrator.eval.every=null"


def rise(values, base=2):
    """From the first steps, which the base policy sampled, to the mean of all others."""
    return statistics.mean(values[base:]) - statistics.mean(values[:base])


def bodies(record):
    """What the tools answered in a rollout."""
    return [message["content"] for message in record["messages"] if message["role"] == "tool"]


@pytest.mark.engine
def test_echo_learns_a_tool_by_its_answers(train, tokenizer):
    run = train(
        *("algo=echo", "env=calculator", "max_steps=8", "orchestrator.batch_size=64", "trainer.optim.lr=2e-4"),
        *("trainer.token_export=true", QUIET),
    )
    assert run.status == 0, run.stderr
    assert rise(run.column("reward/all/mean")) > 0.08
    answered = Counter(
        text for record in run.rollouts(1) if (record["outcome"]["stage"] == "trained") for text in bodies(record)
    )
    chosen = Counter()
    for line in run.tokens(1):
        spans, uses = [[]], line["use"]
        for token, use, mask in zip(line["token_ids"], uses, line["mask"], strict=True):
            assert mask == (use in ("rl kept", "rl dropped")), "the sampled tokens feed rl, and only they"
            if use == "ce":
                spans[-1].append(token)
            elif spans[-1]:
                spans.append([])
        chosen.update(tokenizer.decode(span) for span in spans if span)
        weights = {w for w, use in zip(line["ce_weights"] or [], uses, strict=False) if use == "ce"}
        assert weights <= {0.1}
    assert chosen == answered and sum(chosen.values()) > 20


class Till:
    """A tool env: the last sum that was rung up must be the bill."""

    @staticmethod
    def rows():
        for number in range(2000):
            price, count, bag = number % 89 + 2, number % 8 + 2, number % 47
            yield {"prompt": f"{price}*{count}+{bag}=", "bill": price * count + bag}

    def reset(self, row):
        self.bill, self.rung_up = row["bill"], None

    def calculate(self, expression: str) -> int:
        """The value of an expression."""
        self.rung_up = compute(expression)
        return self.rung_up

    def reward(self):
        return float(self.rung_up == self.bill)


@pytest.mark.slow
def test_a_class_is_learnt_by_calls_of_its_methods(inline):
    run = inline("debug=fast", "env=tools", f"envs.tools.args.env={__name__}.Till", "max_steps=4", QUIET)
    assert run.status == 0, run.stderr
    assert rise(run.column("reward/all/mean"), base=1) > 0.2
    assert max(run.column("logprob_gap/mean")) < 1e-5
    for record in run.rollouts(1):
        bill = compute(record["messages"][0]["content"].removesuffix("="))
        assert record["reward"] == (bodies(record)[-1:] == [str(bill)])


@pytest.mark.slow
def test_guessing_over_many_turns_trains_on_exactly_what_was_sampled(inline):
    run = inline("env=guess", "max_steps=2", "experiment=on_policy", "orchestrator.batch_size=64", QUIET)
    assert run.status == 0, run.stderr
    assert max(run.column("logprob_gap/mean")) < 1e-5, "what was sampled over several turns is what is trained on"
    records = run.rollouts(1)
    samples = Counter(record["samples"] for record in records)
    assert samples[1] > 0.9 * samples.total(), (
        "a turn extends the one before, but for replies that read otherwise than they were sampled"
    )
    assert max(len(record["messages"]) for record in records) >= 6
    answers = {m["content"] for record in records for m in record["messages"][1:] if m["role"] == "user"}
    assert {"higher", "lower"} <= answers <= {"higher", "lower", "a number"}


@pytest.mark.slow
def test_envs_of_every_kind_train_in_one_run(inline):
    envs = ("kuhn_poker", "alphabet_sort", "reasoning_gym")
    few = ("orchestrator.batch_size=96", "orchestrator.eval.every=2", "orchestrator.eval.num_tasks=4")
    run = inline(f"env=[{','.join(envs)}]", "max_steps=2", *few)
    assert run.status == 0, run.stderr
    assert all(0 <= run.steps[-1][f"eval/{env}/avg@1"] <= 1 for env in envs)
    records = [record for step in (1, 2) for record in run.rollouts(step)]
    assert {record["env"] for record in records if (record["outcome"]["stage"] == "trained")} == set(envs)
    games = {}
    for record in records:
        if record["env"] == "kuhn_poker":
            games.setdefault(record["group"], []).append(record)
    for group in games.values():
        seats = Counter(record["agent"] for record in group)
        assert seats == {"player": 4, "opponent": 4}
        assert sum(record["reward"] for record in group) == pytest.approx(4), "what one side wins the other loses"
        for seat in seats:  # each side is its own baseline
            assert sum(r["advantage"] or 0.0 for r in group if r["agent"] == seat) == pytest.approx(0, abs=1e-6)
    sorts = [record for record in records if record["env"] == "alphabet_sort"]
    assert {sum(m["role"] == "user" for m in record["messages"]) for record in sorts} == {2, 3}
