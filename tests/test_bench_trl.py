"""scripts/bench_trl without TRL: what it reads of both sides, its figures, and that both are given the same work."""

import itertools
import math
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
import trl_loop

from prl.compose import compose
from prl.envs.math import MathConfig, MathTaskset
from prl.monitors.console import Console

ROOT = Path(__file__).resolve().parents[1]
BENCH = SourceFileLoader("bench_trl", str(ROOT / "scripts" / "bench_trl")).load_module()


def run_of(rewards, *, seconds=2.0, start=10.0, length=3.0, whole=99.0):
    """A run that makes a step every `seconds`, the first at `start`."""
    times = [start + seconds * number for number in range(len(rewards))]
    return BENCH.Run(times, list(rewards), [length] * len(rewards), whole)


def test_lines_of_both_sides_are_read(tmp_path, capsys):
    console, run = Console(mode="plain"), BENCH.Run()
    console.start(tmp_path, max_steps=60, run_config={})
    console.status("training [math]")
    console.step({"step": 0})
    facts = dict.fromkeys(["loss/mean", "off_policy/mean", "off_policy/max", "tokens/generated", "tokens/trained"], 1.0)
    console.step({"step": 1, "reward/all/mean": 0.4567, "time/step": 1.0, **facts})
    console.close()
    said = [*capsys.readouterr().err.splitlines()]
    logs = {"reward": 0.25, "completions/mean_length": 3.333}
    said += ["Some weights …", trl_loop.line(2, 60, logs)]
    for since, text in enumerate(said):
        run.read(text, float(since))
    assert (run.times, run.rewards, run.lengths) == ([2.0, 4.0], [0.457, 0.25], [3.33])


def test_figures_by_hand():
    run = BENCH.Run([10.0, 11.0, 12.5, 13.0], [0.1] * 4, [3.0, 4.0, 5.0, 4.0], 20.0)
    assert run.figures() == {
        "a step, s": 1.0,  # of 1.0, 1.5, 0.5
        "to the first step, s": 10.0,
        BENCH.REACHED: math.inf,
        "whole command, s": 20.0,
        "tokens a reply": 4.0,
    }


@pytest.mark.parametrize(
    "rewards, at",
    [
        ([0.8] * 5, 18.0),  # not before five steps were seen
        ([0.0, 0.8, 0.8, 0.8, 0.8, 0.8], 20.0),
        ([0.0, 1.0, 1.0, 1.0, 1.0, 0.0], 18.0),  # (0 + 4 · 1) / 5
        ([1.0] * 4, math.inf),
        ([0.79] * 9, math.inf),
    ],
)
def test_the_reward_is_reached_by_the_mean_of_five_steps(rewards, at):
    assert run_of(rewards).reached() == at


def test_the_table_takes_the_better_of_trls_settings():
    one, two, ours = run_of([0.9] * 6, seconds=4.0), run_of([0.1] * 6, seconds=3.0), run_of([0.9] * 6, seconds=1.5)
    lines = BENCH.table({"TRL, 1 thread": [one] * 3, "TRL, 2 threads": [two, two, one], "prl": [ours] * 3}).splitlines()
    assert lines == [
        "| | TRL, 1 thread | TRL, 2 threads | prl | prl / the better |",
        "|---|---|---|---|---|",
        "| a step, s | 4.00 | 3.00 | 1.50 | 0.50 |",
        "| to the first step, s | 10.00 | 10.00 | 10.00 | 1.00 |",
        f"| {BENCH.REACHED} | 26.00 | never | 16.00 | 0.62 |",
        "| whole command, s | 99.00 | 99.00 | 99.00 | 1.00 |",
        "| tokens a reply | 3.00 | 3.00 | 3.00 |  |",
    ]


def test_prl_with_a_warm_engine_has_a_column_and_a_ratio_of_its_own():
    one, ours, warm = run_of([0.9] * 6, seconds=4.0), run_of([0.9] * 6, seconds=2.0), run_of([0.9] * 6, start=4.0)
    head, _, step, first, *_ = BENCH.table({"TRL, 1 thread": [one], "prl": [ours], BENCH.WARM: [warm]}).splitlines()
    assert head == "| | TRL, 1 thread | prl | prl, engine warm | prl / the better | prl, engine warm / the better |"
    assert step == "| a step, s | 4.00 | 2.00 | 2.00 | 0.50 | 0.50 |"
    assert first == "| to the first step, s | 10.00 | 10.00 | 4.00 | 1.00 | 0.40 |"


def test_trl_is_given_prls_settings():
    config = compose(
        [
            "run.name=a",
            *["max_steps=7", "seed=3", "orchestrator.batch_size=48", "orchestrator.group_size=4"],
            *["sampling.temperature=0.7", "sampling.max_tokens=9", "trainer.max_grad_norm=0.3"],
            *["trainer.optim.lr=2e-4", "trainer.optim.betas=[0.8,0.9]", "trainer.optim.eps=1e-6"],
            *["trainer.optim.weight_decay=0.02", "trainer.schedule.warmup_steps=2", *BENCH.FIXED],
        ]
    )
    expected = {
        **{"max_steps": 7, "seed": 3, "per_device_train_batch_size": 48, "num_generations": 4},
        **{"temperature": 0.7, "max_completion_length": 9, "max_grad_norm": 0.3, "learning_rate": 2e-4},
        **{"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6, "weight_decay": 0.02},
        **{"warmup_steps": 2, "lr_scheduler_type": "linear"},
    }
    schedule = config.trainer.schedule
    assert (schedule._target_, schedule.decay_fraction, schedule.min_ratio) == ("prl.trainer.schedule.Linear", 1.0, 0.0)
    given = BENCH.settings(config)
    assert {key: given[key] for key in expected} == expected


@pytest.mark.parametrize("model", ["tiny", "smollm2"])
def test_what_is_measured_by_default_composes(model):
    config = compose(["run.name=a", f"model={model}", *BENCH.USUAL[model]["prl"], *BENCH.FIXED])
    assert config.orchestrator.eval.every is None and config.orchestrator.group_size == 8
    expected = {"tiny": (16, 5e-4), "smollm2": (64, 5e-6)}[model]
    assert (config.sampling.max_tokens, config.trainer.optim.lr) == expected


def test_trl_is_given_prls_tasks_as_prl_renders_them():
    few = ["envs.math.args.num_tasks=20", *BENCH.FIXED]
    work = BENCH.job(compose(["run.name=a", *few]))
    assert (Path(work["model"]) / "model.safetensors").exists() and len(work["tasks"]) == 20
    for task, ours in zip(work["tasks"], MathTaskset(MathConfig(num_tasks=20)), strict=True):
        assert task["prompt"] == f"<|im_start|>user\n{ours.data.prompt}<|im_end|>\n<|im_start|>assistant\n"
        assert task["answer"] == ours.data.answer


def test_trl_gives_prls_rewards():
    tasks = list(MathTaskset(MathConfig(num_tasks=60)))
    replies = ["", "46", "-46", "046", " 7\n", "about 46", *(str(task.data.answer) for task in tasks[:20])]
    pairs = list(itertools.product(replies, tasks))
    rewards = trl_loop.reward([reply for reply, _ in pairs], [task.data.answer for _, task in pairs], prompts=[])
    assert rewards == [task.grade(reply) for reply, task in pairs]
    assert {0.0, 1.0} < set(rewards)


def test_trls_side_needs_no_package_of_prl():
    code = "import sys; sys.path[:0] = sys.argv[1:]; import trl_loop; print(trl_loop.reward(['46', '56'], [46, 46]))"
    command = [sys.executable, "-I", "-S", "-c", code, str(ROOT), str(ROOT / "scripts")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("[1.0, 0.05]\n", "")


def test_a_command_is_watched_to_its_end():
    says = "import sys\nfor n in range(1, 4): print(f'0:01  step {n}/3  reward=0.500  loss=1', file=sys.stderr)"
    run = BENCH.watch([sys.executable, "-c", says], BENCH.environment(), 3)
    assert run.rewards == [0.5] * 3 and 0 < run.times[0] <= run.times[2] <= run.whole
    with pytest.raises(SystemExit, match=r"(?s)status 0 after 3 of 4 steps.*step 3/3"):
        BENCH.watch([sys.executable, "-c", says], BENCH.environment(), 4)
    with pytest.raises(SystemExit, match=r"(?s)status 1 after 3 of 3 steps"):
        BENCH.watch([sys.executable, "-c", f"{says}\nsys.exit(1)"], BENCH.environment(), 3)


def test_threads_of_the_shell_reach_neither_side(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("PIP_USER", "1")
    assert not {"OMP_NUM_THREADS", "PIP_USER"} & BENCH.environment().keys()


def test_arguments_that_are_not_its_own_are_prls():
    args = BENCH.arguments(["--model", "smollm2", "--turns", "2", "env=math", "--threads", "2"])
    assert args.overrides == ["env=math"] and args.threads == [2]
    assert (args.rollouts, args.steps) == ([32], 5)
    assert BENCH.arguments(["--rollouts", "64"]).rollouts == [64] and BENCH.arguments([]).steps == 60


@pytest.mark.parametrize("words", [["--steps", "1"], ["--turns", "0"], ["--model", "tiny-teacher"]])
def test_impossible_arguments_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        BENCH.arguments(words)
    assert "error:" in capsys.readouterr().err


def test_turns_are_interleaved(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(BENCH, "job", lambda config: {"seed": config.seed, "size": config.orchestrator.batch_size})
    monkeypatch.setattr(BENCH, "trl_side", lambda *args: seen.append(args) or run_of([0.9] * 6))
    monkeypatch.setattr(
        BENCH, "prl_side", lambda words, steps, _: seen.append(words[1]) or run_of([0.9] * 6, seconds=1.0)
    )
    given = BENCH.arguments(["--turns", "2"])
    BENCH.compare(given, 128, Path("python"), None)
    trl = [[(Path("python"), {"seed": turn, "size": 128}, threads) for threads in (1, 2)] for turn in (0, 1)]
    assert seen == [*trl[0], "seed=0", *trl[1], "seed=1"]
    out = capsys.readouterr().out
    assert "| a step, s | 2.00 | 2.00 | 1.00 | 0.50 |" in out and "128 rollouts a step, 60 steps, medians of 2" in out


def test_a_finished_environment_is_used_and_a_strangers_folder_left_alone(tmp_path, monkeypatch):
    made = []

    def done(command, *, needed=True):
        made.append([str(word) for word in command])
        (tmp_path / "trl").mkdir(exist_ok=True)
        (tmp_path / "trl" / "pyvenv.cfg").touch()
        return len(made) != 2  # pip is configured for no folder with a CPU build of torch

    monkeypatch.setattr(BENCH, "done", done)
    python = BENCH.trl_python(tmp_path)
    assert python == tmp_path / "trl" / "bin" / "python" and len(made) == 4
    assert made[0][-1] == str(tmp_path / "trl") and "--index-url" in made[2] and made[2][-1] == made[1][-1]
    assert "--require-hashes" in made[3] and made[3][-1] == str(BENCH.LOCK)
    assert BENCH.trl_python(tmp_path) == python and len(made) == 4
    (tmp_path / "trl" / "pyvenv.cfg").unlink()
    (tmp_path / "trl" / "made_from").write_text("another lock")
    with pytest.raises(SystemExit, match="--cache"):
        BENCH.trl_python(tmp_path)
