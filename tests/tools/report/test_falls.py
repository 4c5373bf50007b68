"""Falls of a reward in made runs: the cause is known, or there is none."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from prl.runs.result import RunResult
from prl.tools.report import sum_up
from prl.tools.report.falls import explained, sampled_course
from prl.tools.report.page import page
from prl.tools.report.runs import Run, read_run
from prl.tools.report.verdict import capitalised, verdict

STEPS = np.arange(1, 101)


def healthy(seed, rate=lambda step: 5e-4 * (1 - 0.9 * step / 100)):
    """Metrics of a run that learns: 100 steps of 64 rollouts, an evaluation of 64 tasks every 20."""
    rng = np.random.default_rng(seed)
    learnt = 1 - np.exp(-STEPS / 15)
    metrics = pd.DataFrame(
        {
            "lr": rate(STEPS),
            "reward/all/mean": rng.binomial(64, 0.3 + 0.5 * learnt) / 64,
            "entropy/all/mean": 0.9 * np.exp(-1.2 * learnt + 0.08 * rng.standard_normal(100)),
            "logprob_gap/mean": 0.02 * np.exp(0.2 * rng.standard_normal(100)),
            "grad_norm": 0.6 * np.exp(0.3 * rng.standard_normal(100)),
            "length/all/mean": 12 + 0.3 * rng.standard_normal(100),
            "truncated/all": rng.binomial(64, 0.02, 100) / 64,
            "off_policy/mean": np.ones(100),
        },
        index=pd.Index(STEPS, name="step"),
    )
    metrics.loc[0] = np.nan
    metrics = metrics.sort_index()
    for step in range(0, 101, 20):
        share = rng.binomial(64, 0.8 if step else 0.3) / 64
        metrics.loc[step, ["eval/m/avg@1", "eval/m/stderr"]] = share, np.sqrt(share * (1 - share) / 63)
    return metrics


def run_of(metrics, status="completed", folder="/a"):
    ended = RunResult(status=status, steps=100, seconds=60.0)
    return Run(dir=Path(folder), config={"max_steps": 100}, overrides=[], result=ended, metrics=metrics, problems=[])


def falls_from(metrics, step, sampled=0.02, held_out=0.01):
    """The rewards fall at a step."""
    rng = np.random.default_rng(step)
    after = metrics.index >= step
    metrics.loc[after, "reward/all/mean"] = rng.binomial(64, sampled, after.sum()) / 64
    evaluated = after & metrics["eval/m/avg@1"].notna()
    metrics.loc[evaluated, ["eval/m/avg@1", "eval/m/stderr"]] = held_out, 0.012


def later(metrics, name, step, factor):
    metrics.loc[metrics.index >= step, name] *= factor


def rate(metrics):
    later(metrics, "lr", 50, 60)
    later(metrics, "grad_norm", 51, 30)
    later(metrics, "entropy/all/mean", 51, 5)
    later(metrics, "logprob_gap/mean", 51, 20)
    falls_from(metrics, 52)


def grader(metrics):
    later(metrics, "grad_norm", 50, 0.01)  # equal rewards have no gradient
    falls_from(metrics, 50, 0.0, 0.0)


def harder_tasks(metrics):
    later(metrics, "length/all/mean", 50, 1.3)
    falls_from(metrics, 50, 0.1, 0.8)


def staleness(metrics):
    later(metrics, "off_policy/mean", 44, 6)
    later(metrics, "logprob_gap/mean", 45, 8)
    falls_from(metrics, 50)


def limit(metrics):
    metrics.loc[50:, "truncated/all"] = 0.9
    later(metrics, "length/all/mean", 50, 0.5)
    falls_from(metrics, 50)


def growing_length(metrics):
    grown = np.exp(0.25 * np.clip(metrics.index - 44, 0, 12))
    metrics["length/all/mean"] *= grown
    metrics.loc[50:, "truncated/all"] = 0.9
    falls_from(metrics, 50)


def collapse(metrics):
    later(metrics, "entropy/all/mean", 47, 0.05)
    falls_from(metrics, 50)


def errors(metrics):
    metrics["rollouts/arrived"], metrics["rollouts/errored"] = 64.0, 0.0
    metrics.loc[50:, "rollouts/errored"] = 60.0
    falls_from(metrics, 50)


def gradually(metrics):
    later(metrics, "lr", 48, 60)
    falls_from(metrics, 72)
    metrics.loc[48:71, "reward/all/mean"] = np.linspace(0.78, 0.05, 24)


def gradually_for_no_reason(metrics):
    gradually(metrics)
    later(metrics, "lr", 48, 1 / 60)


BROKEN = [
    (errors, "held-out", "fell at step 50. First moved: failing rollouts (step 50 on: 0 to 0.938)", "read the errors"),
    (gradually, "held-out", "First moved: learning rate (step 48 on: 0.", "lower trainer.optim.lr"),
    (gradually_for_no_reason, "held-out", "was seen to move before. Try: compare the rollouts of steps ", "."),
    (rate, "held-out", "fell at step 52. First moved: learning rate (step 50 on: 0.", "lower trainer.optim.lr"),
    (grader, "held-out", "fell at step 50; none of", "likely the grader changed"),
    (staleness, "held-out", "First moved: staleness (step 44 on: 1 to 6), then gap", "orchestrator.max_async_level"),
    (limit, "held-out", "fell at step 50. First moved: truncated share (step 50 on: 0.0", "sampling.max_tokens"),
    (growing_length, "held-out", "First moved: length (step ", "what the grader rewards"),
    (collapse, "held-out", "First moved: entropy (step 47 on: ", "lower trainer.optim.lr"),
]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("break_it", "which", "cause", "remedy"), BROKEN)
def test_a_fall_is_the_headline_with_what_moved_first(break_it, which, cause, remedy, seed):
    metrics = healthy(seed)
    break_it(metrics)
    headline, why, state, *_ = verdict(run_of(metrics))
    assert headline.text.startswith(f"{which.capitalize()} reward rose from 0.") and headline.mood == "bad"
    assert "its best) and fell to 0.0" in headline.text
    assert state.text.startswith("Completed") and why.mood == "bad"
    assert cause in why.text and remedy in why.text
    failed = verdict(run_of(metrics, status="failed"))
    assert failed[0].text.startswith("Failed") and failed[1] == headline and failed[2] == why


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["learns", "constant", "noise", "plateau"])
def test_noise_is_no_fall(kind, seed):
    metrics = healthy(seed)
    rng = np.random.default_rng(100 + seed)
    if kind == "constant":
        metrics[["reward/all/mean", "eval/m/avg@1"]] *= 0
    elif kind == "noise":
        metrics["reward/all/mean"] = 0.5 + 0.2 * rng.standard_normal(len(metrics))
        metrics = metrics.drop(columns=["eval/m/avg@1", "eval/m/stderr"])
    elif kind == "plateau":
        metrics.loc[metrics["eval/m/avg@1"].notna(), "eval/m/avg@1"] = rng.binomial(64, 0.5, 6) / 64
    assert all("fell" not in finding.text for finding in verdict(run_of(metrics)))


def test_sampled_rewards_alone_fall_where_the_training_tasks_are_harder():
    metrics = healthy(0)
    harder_tasks(metrics)
    headline, why, *_ = verdict(run_of(metrics))
    assert re.fullmatch(
        r"Held-out reward 0.\d\d to 0.80; sampled reward rose from .* and fell to 0.\d\d.", headline.text
    )
    assert headline.mood == why.mood == "warn"
    assert "The reward fell at step 50; none of" in why.text and "likely the tasks or their answers changed" in why.text
    alone = metrics.drop(columns=["eval/m/avg@1", "eval/m/stderr"])
    assert "the tasks or the grader changed" in verdict(run_of(alone))[1].text


def test_one_run_has_one_beginning():
    """The evaluation before training where there is one, else the first step: no mean over steps that learn."""
    metrics = healthy(0)
    first, last = metrics["eval/m/avg@1"].iloc[[0, -1]]
    assert verdict(run_of(metrics))[0].text == f"Held-out reward {first:.2f} to {last:.2f}."
    sampled = metrics.drop(columns=["eval/m/avg@1", "eval/m/stderr"])
    first, last = sampled["reward/all/mean"].iloc[1], sampled["reward/all/mean"].iloc[-5:].mean()
    assert verdict(run_of(sampled))[0].text == f"Sampled reward {first:.2f} to {last:.2f}."


def test_a_fall_from_the_beginning_and_one_of_few_evaluations():
    evaluations = pd.DataFrame({"eval/m/avg@1": {0: 0.5, 20: 0.02, 40: 0.01}, "eval/m/stderr": {0: 0.06, 20: 0.02}})
    headline = verdict(run_of(evaluations))[0]
    assert headline.text == "Held-out reward fell from 0.50 (step 0, its best) to 0.01." and headline.mood == "bad"
    within = evaluations.assign(**{"eval/m/avg@1": [0.5, 0.45, 0.35]})
    assert verdict(run_of(within))[0].mood == "plain", "0.15 is 2.4 standard errors of one evaluation"
    of_another_version = evaluations[["eval/m/avg@1"]]
    assert verdict(run_of(of_another_version))[0].mood == "bad", "without its standard error at most 0.0625"


def test_a_lucky_step_is_not_the_best():
    values = pd.Series([0.5, 0.52] * 20, index=range(1, 41))
    values[20] = 3.0
    found = sampled_course("x", values)
    assert not found.fell and found.best < 0.6


def test_many_noisy_steps_show_a_small_fall():
    values = pd.Series(np.random.default_rng(1).normal(0.6, 0.14, 60), index=range(1, 61))
    assert not sampled_course("x", values).fell
    values[values.index > 30] -= 0.35
    found = sampled_course("x", values)
    assert found.fell and found.last == pytest.approx(values.iloc[-5:].mean())


@pytest.mark.parametrize("seed", range(20))
def test_few_successes_that_stay_away_are_no_fall(seed):
    counts = np.random.default_rng(seed).binomial(64, 0.003, 40)
    assert not sampled_course("x", pd.Series(counts / 64, index=range(1, 41))).fell


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([0.3] + [0.5, 0.6, 0.7, 0.6, 0.6] + [0.1] * 20, "x rose from 0.30 to 0.60 (steps 2 to 6, its best)"),
        ([0.9] + [0.6] * 30 + [0.1] * 20, "x fell from 0.90 (its best mean 0.60, steps 2 to 6) to 0.10"),
        ([0.6, 0.58, 0.3, 0.02] + [0.02] * 30, "x fell from 0.60 (its best mean 0.30, steps 1 to 5) to 0.02"),
    ],
)
def test_the_best_is_the_mean_of_the_steps_named_and_the_first_value_is_said(values, text):
    assert sampled_course("x", pd.Series(values, index=range(1, len(values) + 1))).text.startswith(text)


@pytest.mark.parametrize("collapse", [2, 3, 4, 5])
def test_a_collapse_of_the_first_steps_lowers_the_rate(collapse):
    metrics = healthy(0).drop(columns=["eval/m/avg@1", "eval/m/stderr"])
    metrics["reward/all/mean"] = np.where(metrics.index < collapse, 0.8, 0.01)
    for evaluated in ({0: 0.8, 10: 0.01, 20: 0.01}, {}):
        run = run_of(metrics.assign(**{"eval/m/avg@1": pd.Series(evaluated, dtype=float)}))
        assert "fell in the first steps" in (why := verdict(run)[1].text) and "lower trainer.optim.lr" in why


def test_rollouts_of_old_policies_show_a_fall_later():
    """The policy is ruined by step 5; sampled rewards are those of the first policy for 16 steps more."""
    metrics = healthy(0)
    metrics["reward/all/mean"] = np.where(metrics.index < 21, 0.5 + metrics["grad_norm"] / 100, 0.01)
    metrics["off_policy/mean"] = metrics["off_policy/max"] = np.clip(metrics.index - 1.0, 0, 16)
    metrics[["eval/m/avg@1", "eval/m/stderr"]] = np.nan
    for step in range(0, 101, 5):
        metrics.loc[step, ["eval/m/avg@1", "eval/m/stderr"]] = 0.01 if step else 0.5, 0.02
    texts = [finding.text for finding in verdict(run_of(metrics))]
    assert "fell in the first steps, by step 5. Try: lower trainer.optim.lr" in texts[1]
    assert "The last rollouts were 16 policy versions old" in "".join(texts)
    assert "versions old" not in "".join(one.text for one in verdict(run_of(healthy(0))))


@pytest.mark.parametrize("has", [lambda step: step <= 40, lambda step: step > 40])
def test_an_env_whose_evaluations_stop_or_begin_later_is_no_fall(has):
    metrics = healthy(0)
    evaluated = metrics["eval/m/avg@1"].notna() & has(metrics.index)
    metrics.loc[evaluated, ["eval/easy/avg@1", "eval/easy/stderr"]] = 0.99 if has(0) else 0.01, 0.01
    assert all("fell" not in finding.text for finding in verdict(run_of(metrics)))


def test_a_fall_of_one_env_is_the_headline_where_another_rose():
    metrics = healthy(0)
    evaluated = metrics["eval/m/avg@1"].notna()
    metrics.loc[evaluated, ["eval/b/avg@1", "eval/b/stderr"]] = 0.1, 0.04
    falls_from(metrics, 50, sampled=0.5)
    metrics.loc[evaluated & (metrics.index > 50), "eval/b/avg@1"] = 0.95
    headline = verdict(run_of(metrics))[0]
    assert headline.text.startswith("Held-out reward of m rose from 0.") and "fell to 0.01" in headline.text
    assert headline.mood == "bad"


@pytest.mark.parametrize(
    ("changed", "fell"), [({"trainer.optim.lr": [0.0005, 0.03]}, True), ({"envs.m": [1, 2]}, False)]
)
def test_a_fork_is_judged_against_its_source(write_run, tmp_path, changed, fell):
    """Unless its tasks are others."""
    source = [{"step": step, "lr": 0.0005, "reward/all/mean": 0.8} for step in range(1, 31)]
    ruined = [{"step": step, "lr": 0.03, "reward/all/mean": 0.8 if step == 31 else 0.05} for step in range(31, 61)]
    first = write_run(tmp_path / "first", source)
    fork = write_run(tmp_path / "fork", ruined, result={"status": "completed", "steps": 60, "seconds": 9.0})
    line = {"step": 30, "checkpoint": f"{first}/checkpoints/step_000030", "changed": changed}
    (fork / "resumes.jsonl").write_text(json.dumps(line) + "\n")
    headline, why, *_ = verdict(read_run(fork))
    assert headline.mood == "bad" and "fell" in headline.text
    assert ("its best mean 0.80, steps 1 to 5" in headline.text) == fell, headline.text
    if fell:
        assert "fell at step 32. First moved: learning rate (step 31 on: 0.0005 to 0.03)" in why.text
        assert why.text.endswith("The last checkpoint before: step 30.")


def test_two_steps_are_shown_where_tasks_or_grader_changed(tmp_path):
    metrics = healthy(0)
    harder_tasks(metrics)
    run = run_of(metrics, folder=tmp_path)
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "checkpoints" / "step_000040").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_000060").mkdir()
    assert "Before:" not in verdict(run)[1].text
    sums = dict.fromkeys((10, 60, 100), ("1+1=", (1.0, 0.5)))
    sums |= {49: ("44+42=", (1.0, 0.5)), 50: ("83*51=\x1b[2J", (0.0, None))}
    for step, (prompt, answers) in sums.items():
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": "86"}]
        lines = [
            {"step": step, "env": "m", "group": 0, "reward": answer, "rewards": {"answer": answer}}
            | {"metrics": {"right": 0.5}, "messages": messages}
            for answer in answers
        ]
        path = tmp_path / "rollouts" / f"step_{step:06d}.jsonl"
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 50, "en')
    why = verdict(run)[1]
    shown = 'Before: "44+42=" "86", answer 0.75, right 0.50. Then: "83*51=\\x1b[2J" "86", answer 0.00, right 0.50.'
    assert shown in why.text
    assert why.text.endswith("The last checkpoint before: step 40.")
    shown = page(run)
    assert re.findall(r'"step":(\d+),"groups"', shown) == ["10", "49", "50", "100"]
    assert '"compared":[49,50]' in shown
    path.write_text(json.dumps(lines[0] | {"env": "another"}) + f"\n{json.dumps(lines[1])}\n")
    assert "Before:" not in verdict(run)[1].text, "of several envs the means would be mixed"


def test_an_evaluation_whose_rollouts_fail_and_one_without_signals():
    metrics = healthy(0)
    falls_from(metrics, 61, sampled=0.8, held_out=0.0)
    assert "between the evaluations of steps 60 and 80; none of" in verdict(run_of(metrics))[1].text
    alone = verdict(run_of(metrics[["eval/m/avg@1", "eval/m/stderr"]]))[1].text
    assert "no signal was recorded" in alone and "changed" not in alone
    metrics["eval/m/errored"] = metrics["eval/m/avg@1"].where(metrics["eval/m/avg@1"].isna(), 0.0)
    metrics.loc[80:, "eval/m/errored"] *= np.nan
    metrics.loc[[80, 100], "eval/m/errored"] = 1.0
    assert "First moved: failing rollouts (step 80 on: 0 to 1)" in verdict(run_of(metrics))[1].text


def test_a_limit_that_an_evaluation_meets_first():
    """The evaluation of step 60 is the first to be cut off, the rollouts of step 62 the next."""
    metrics = healthy(0)
    falls_from(metrics, 60)
    metrics.loc[60:61, "reward/all/mean"] = 0.8
    metrics.loc[62:, "truncated/all"] = 0.93
    metrics["eval/m/truncated"] = metrics["eval/m/avg@1"].where(metrics["eval/m/avg@1"].isna(), 0.0)
    metrics.loc[[60, 80, 100], "eval/m/truncated"] = 0.95
    assert "First moved: truncated share (step 60 on: 0.0" in verdict(run_of(metrics))[1].text


@pytest.mark.parametrize("values", [{}, {1: np.nan}, {1: np.inf}, {1: 0.5}, {1: 0.5, 2: 0.1}])
def test_few_values_are_no_fall(values):
    found = sampled_course("x", pd.Series(values, dtype=float))
    assert found is None or not found.fell


def test_signals_may_be_missing_or_end_before_the_fall():
    metrics = healthy(0)
    falls_from(metrics, 50)
    metrics.loc[48:, "entropy/all/mean"] = np.nan
    fall = sampled_course("x", metrics["reward/all/mean"])
    assert "gradient norm, entropy, length" in explained(metrics, fall)
    assert "none of learning rate was seen to move before. Try" in explained(metrics[["lr"]], fall)


def test_batches_without_signal_that_ended_a_run_count(write_run, tmp_path, capsys):
    """They make no steps: of the steps alone the reward rose."""
    metrics = healthy(0)
    metrics.loc[100, "lr"] = 0.03
    lines = [{"step": step} | row.dropna().to_dict() for step, row in metrics.filter(regex="lr|reward").iterrows()]
    ended = {"status": "failed", "error": "no signal", "steps": 100, "seconds": 3.0}
    run = write_run(tmp_path / "run", lines, result=ended)
    assert verdict(read_run(run))[1].text.startswith("Sampled reward 0.")
    (run / "result.json").write_text(json.dumps(ended | {"reward_without_signal": 0.0}))
    headline, why, state, *others = verdict(read_run(run))
    assert state.text.startswith("Failed") and others[0].text == f"all: s{headline.text[1:]}"
    assert headline.text.endswith("and fell to 0.00.") and state.mood == headline.mood == "bad"
    assert re.match(r"The reward fell at step 101. First moved: learning rate \(step 100 on: .* to 0.03\)", why.text)
    sum_up(read_run(run).result, str(run))
    assert [capitalised(line.rstrip(".")) for line in capsys.readouterr().err.splitlines()[1:3]] == [
        headline.text.rstrip("."),
        why.text.rstrip("."),
    ]


def test_rewards_of_demonstrations_are_not_the_runs(write_run, tmp_path):
    config = "envs: {m: {weight: 1}}\nalgo: {sampling: {source: demonstrations}}\n"
    lines = [{"step": step, "reward/all/mean": 1.0, "reward/m/mean": 1.0} for step in (1, 2)]
    texts = [one.text for one in verdict(read_run(write_run(tmp_path / "run", lines, config)))]
    assert "No training step was recorded." not in texts and "Sampled" not in "".join(texts)
    assert "m: reward of demonstrations 1.00 to 1.00." in texts


def test_a_resumed_or_forked_run_says_so(write_run, tmp_path):
    run = write_run(tmp_path / "run with space", [{"step": 1, "reward/all/mean": 0.5}], result={"status": "completed"})
    lines = [
        {"step": 3, "checkpoint": "/other/checkpoints/step_000003", "changed": {}},
        {"step": 40, "checkpoint": "step_000040", "changed": {"trainer.optim.lr": [0.0005, 0.03]}},
        {"step": 50, "checkpoint": "step_000050"},
    ]
    (run / "resumes.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 60, "check')
    texts = [finding.text for finding in verdict(read_run(run))]
    assert "Forked from /other/checkpoints/step_000003." in texts
    assert "Resumed after step 40 with trainer.optim.lr=0.03 (before 0.0005)." in texts
    assert "Resumed after step 50." in texts
