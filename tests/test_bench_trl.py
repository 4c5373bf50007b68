"""scripts/bench_trl without TRL: what it reads of both sides, its figures, and that both are given the same work."""

import base64
import io
import itertools
import math
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
import trl_loop
from PIL import Image

from prl.config.compose import compose
from prl.envs.tasksets.math import MathConfig, MathTaskset
from prl.envs.tasksets.shapes import ShapesConfig, ShapesTaskset
from prl.monitors.console import Console

ROOT = Path(__file__).resolve().parents[1]
BENCH = SourceFileLoader("bench_trl", str(ROOT / "scripts" / "bench_trl")).load_module()


def test_lines_of_both_sides_are_read(tmp_path, capsys):
    console, run = Console(mode="plain"), BENCH.Run()
    console.start(tmp_path, max_steps=60, run_config={})
    console.status("training [math]")
    console.step({"step": 0})
    rates = ["tokens/generated_per_second", "tokens/trained_per_second"]
    facts = dict.fromkeys(["loss/mean", "off_policy/mean", "off_policy/max", *rates], 1.0)
    console.step({"step": 1, "reward/all/mean": 0.4567, "time/step": 1.0, **facts})
    console.close()
    printed = [*capsys.readouterr().err.splitlines()]
    logs = {"reward": 0.25, "completions/mean_length": 3.333}
    printed += ["Some weights …", trl_loop.line(2, 60, logs)]
    for since, text in enumerate(printed):
        run.read(text, float(since))
    assert (run.times, run.rewards, run.lengths) == ([2.0, 4.0], [0.457, 0.25], [3.33])


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
def test_reward_is_reached_by_mean_of_five_steps(rewards, at):
    times = [10.0 + 2.0 * number for number in range(len(rewards))]
    assert BENCH.Run(times, list(rewards), [3.0] * len(rewards), 99.0).reached() == at


def test_a_step_is_the_mean_of_its_run_and_a_ratio_that_of_means():
    """Steps of 9, 1 and 9 s in one turn, and of 3 s in the other: 19 / 3 and 3, whose mean is 14 / 3."""
    ours = [
        BENCH.Run([6.0, 15.0, 16.0, 25.0], [1.0] * 4, [3.0], 28.0),
        BENCH.Run([6.0, 9.0, 12.0, 15.0], [1.0] * 4, [3.0], 20.0),
    ]
    first = ours[0].figures()
    assert first["a step, s"] == pytest.approx(19 / 3)
    assert first["from the last step to the prompt, s"] == 3.0
    theirs = [BENCH.Run([4.0, 12.0], [1.0] * 2, [3.0], 20.0), BENCH.Run([4.0, 10.0], [1.0] * 2, [3.0], 12.0)]
    rows = [line.split(" | ") for line in BENCH.table({"TRL, 1 thread": theirs, "prl": ours}).splitlines()]
    by_name = {row[0].strip("| "): [cell.strip("| ") for cell in row[1:]] for row in rows}
    assert by_name["a step, s"] == ["7.00", "4.67", "0.67"]
    assert by_name["whole command, s"] == ["16.00", "24.00", "1.50"]
    assert by_name[BENCH.REACHED] == ["never in 2 of 2", "never in 2 of 2", ""]


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
    assert (schedule["decay_fraction"], schedule["min_ratio"]) == (1.0, 0.0)
    assert schedule["_target_"] == "prl.trainer.schedule.Linear"
    given = BENCH.settings(config)
    assert {key: given[key] for key in expected} == expected


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


def test_trl_is_given_prls_pictures_at_their_places(tmp_path):
    few = ["model=tiny_vl", "env=shapes", "envs.shapes.args.num_tasks=20", "engine=transformers"]
    work = BENCH.job(compose([f"run.dir={tmp_path / 'run'}", *few, *BENCH.FIXED]))
    assert (Path(work["model"]) / "model.safetensors").exists() and len(work["tasks"]) == 20
    for task, ours in zip(work["tasks"], ShapesTaskset(ShapesConfig(num_tasks=20)), strict=True):
        picture, question = ours.data.prompt[0].content
        given = trl_loop.with_pictures(task)
        asked = {"type": "text", "text": question.text}
        assert given["prompt"] == [{"role": "user", "content": [{"type": "image"}, asked]}]
        drawn = Image.open(io.BytesIO(base64.b64decode(picture.image_url.url.partition(",")[2])))
        assert [image.tobytes() for image in given["images"]] == [drawn.convert("RGB").tobytes()]
        assert given["answer"] == ours.data.answer


def test_trl_gives_the_rewards_of_shapes():
    tasks = list(ShapesTaskset(ShapesConfig(num_tasks=20)))
    replies = ["", "red", " Red.\n", "2", "2.", "left right", *(task.data.answer for task in tasks)]
    pairs = list(itertools.product(replies, tasks))
    said = [[{"role": "assistant", "content": reply}] for reply, _ in pairs]
    rewards = trl_loop.reward(said, [task.data.answer for _, task in pairs], prompts=[])
    assert rewards == [task.grade(reply) for reply, task in pairs]
    assert set(rewards) == {0.0, 1.0}
