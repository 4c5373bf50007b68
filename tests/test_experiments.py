"""The experiments: no job of theirs would be refused, and a page has the command of each."""

import functools
import itertools
import json
import math
import random
import shutil
import warnings
from pathlib import Path

import hydra
import pandas as pd
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from prepared_run import validated

from experiments import recompute
from experiments.credit import check as check_credit
from experiments.forgetting.kl import mean_kl
from experiments.max_rl.maze import Maze, MazeConfig, MazeTaskset
from experiments.smollm2 import adder, baselines, held_out
from prl.config.compose import CONF, compose
from prl.launch.components import build_components
from prl.tools.sweep.naming import folder_of, overrides_of

BASES = {
    "sanity_tasks",
    "max_rl_base",
    "forgetting_start",
    "distil_back_teacher",
    "smollm2_sums",
    "smollm2_adder_form",
    "smollm2_adder",
    "smollm2_sums_grpo",
}
"""Single runs that a sweep begins with; the page of the sweep has their commands."""
RECIPES = {"dapo", "dr_grpo", "rloo", "gspo", "cispo", "tis", "gkd", "sdft", "reinforce_pp"}
"""Single runs, by the names of papers: `tests/e2e/test_recipes.py` trains them."""
SINGLE = {"mixed_grpo_opd", "on_policy", *BASES, *RECIPES}
AGAIN = [
    "staleness loss=ppo loss.proximal=true loss.correction=tis run.name=exp-staleness-decoupled",
    "distil_back model.lr=5e-4 run.name=exp-distil-back-5e-4",
    "opsd_drift sampling.max_tokens=3 run.name=exp-opsd-cut-off",
]
"""Sweeps that a page makes of an experiment's."""
SWEEPS = sorted({path.stem for path in CONF.glob("experiment/*.yaml")} - SINGLE)


@functools.cache
def composed(*overrides):
    """The config of a sweep as Hydra has it; nobody may change it."""
    overrides = list(overrides)
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        config = hydra.compose("train", overrides, return_hydra_config=True)
    config.hydra.overrides.task = overrides
    return config


def jobs(words):
    """The overrides of each job of a sweep."""
    typed = [f"experiment={words[0]}", *words[1:]]
    sweep = composed(*typed)
    assert sweep.hydra.mode.name == "MULTIRUN"
    given = {
        each.get_key_element(): each for each in OverridesParser.create().parse_overrides(overrides_of(sweep.hydra))
    }
    varied = [
        [f"{key}={value}" for value in each.sweep_string_iterator()]
        for key, each in given.items()
        if each.is_sweep_override() and key != "seed"
    ]
    return [[*typed, *job] for job in itertools.product(*varied)]


def check(overrides):
    """Build a job as a run would, with pools that another run would have left."""
    run = compose([*overrides, "curriculum.load_from=null"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        validated(run)
        build_components(run)


@pytest.mark.parametrize("words", [*SWEEPS, *AGAIN])
def test_no_job_of_a_sweep_is_refused(words):
    for overrides in jobs(words.split()):
        check(overrides)


@pytest.mark.parametrize("name", sorted(SINGLE))
def test_no_single_run_is_refused(name):
    check([f"experiment={name}", "run.name=x"])


@pytest.mark.parametrize("words", [words for words in [*SWEEPS, *AGAIN] if words.split()[0] != "three_seeds"])
def test_its_page_has_the_command_and_the_report(words):
    name, *more = words.split()
    page = Path(__file__).parents[1].joinpath("experiments", name, "README.md").read_text()
    assert f"\nprl train experiment={words}\n" in page.replace("python -m prl.train", "prl train")
    folder = folder_of(composed(f"experiment={name}", *more))
    [report] = [line for line in page.splitlines() if line.startswith("prl report ")]
    assert f" {folder} " in report and report.endswith(f" --out experiments/{name}")


@pytest.mark.parametrize(
    ("reply", "solved"),
    [
        ("212212", True),  # around the wall at 11
        ("2122 12", False),
        ("1112", False),  # through the wall
        ("212223", False),  # not at the goal
        ("22231312", False),  # a jump
        ("3031323313", False),  # past the goal's neighbour, not on it
        ("²¹", False),
        ("", False),
    ],
)
def test_maze_is_graded_by_its_cells(reply, solved):
    maze = Maze(4, start=(2, 0), goal=(1, 2), walls={(1, 1)})
    assert maze.solved_by(reply) is solved


def test_mazes_have_ways_that_are_as_short_as_can_be():
    tasks = list(MazeTaskset(MazeConfig(size=4, min_way=4, num_tasks=50)).load())
    assert len({task.key for task in tasks}) == 50
    for task in tasks:
        way = task.data.demonstration
        apart = sum(abs(a - b) for a, b in zip(task.data.start, task.data.goal, strict=True))
        assert task.grade(way) == 1.0 and len(way) // 2 >= max(4, apart)
    walls = {(0, 1), (1, 1)}
    assert len(Maze(3, (0, 0), (0, 2), walls).shortest_way(random.Random(0))) == 6
    assert Maze(2, (0, 0), (1, 1), {(0, 1), (1, 0)}).shortest_way(random.Random(0)) is None


def test_kl_of_replies_is_summed_over_tokens_and_averaged_over_replies():
    start = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).double().log()
    policy = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).double().log()
    of_token = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert mean_kl([start, start], [policy, start]) == pytest.approx(of_token / 2, rel=1e-12)


def test_credit_is_compared_at_the_tokens_of_the_run_that_sampled_fewest(tmp_path):
    """Tokens 0, 100, 200 of the one, 0, 300 of the other: compared at 200, where the other has two thirds."""
    for arm, tokens, rewards in (("credit_grpo", (100, 100), (0.0, 0.4, 0.6)), ("credit_turn", (300,), (0.0, 0.9))):
        for seed in range(2):
            run = tmp_path / f"arm={arm},env=guess,seed={seed}"
            run.mkdir()
            (run / ".hydra").mkdir()
            (run / ".hydra" / "overrides.yaml").write_text(f"[arm={arm}, env=guess, seed={seed}]")
            (run / "config.yaml").write_text(f"seed: {seed}")
            (run / "result.json").write_text('{"status": "completed"}')
            lines = [{"step": 0, "eval/guess/avg@1": rewards[0]}]
            lines += [
                {"step": step, "tokens/generated": more, "eval/guess/avg@1": rewards[step] + seed / 10}
                for step, more in enumerate(tokens, 1)
            ]
            (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    [grpo, turn] = check_credit.table(check_credit.at_equal_tokens(tmp_path)).to_dict("records")
    half = 12.706204736 / 2  # Student's t of one degree of freedom, times the standard error of two values
    assert grpo["tokens"] == "200" and grpo["held-out"] == f"0.650 ± {0.1 * half:.3f}"
    lead = [0.6 - 0.6, 1.0 * 2 / 3 - 0.7]
    assert turn["against grpo"] == f"{sum(lead) / 2:+.3f} ± {abs(lead[0] - lead[1]) * half:.3f}"


@pytest.mark.parametrize("name", recompute.PAGES)
def test_a_page_has_the_numbers_of_its_files(name):
    assert recompute.differences(name) == []


def test_another_number_on_a_page_is_found(tmp_path, monkeypatch):
    shutil.copytree(recompute.HERE / "lora", tmp_path / "lora")
    page = tmp_path / "lora" / "README.md"
    text = page.read_text()
    monkeypatch.setattr(recompute, "HERE", tmp_path)
    # Another digit, digits behind it, and a cell that no file has.
    for written, other in ((".875)", ".876)"), (".875)", ".875)1"), ("(.801 to .875)", "(.801 to .875) | .9")):
        page.write_text(text.replace(written, other))
        assert [row[0] for row in recompute.differences("lora")] == ["1e-3", "1e-3"]
    page.write_text(text.replace("\n| 1e-3 |", "\n| 2e-3 | .9 | .9 | .9 | .9 |\n| 1e-3 |"))
    assert recompute.differences("lora") == [["2e-3", ".9", ".9", ".9", ".9"]]


@pytest.mark.parametrize(
    ("page", "file", "row", "column", "lost"),
    [
        ("max_rl", "pass_at_k.csv", 1, "256", ["grpo, groups of 16", "max_rl − grpo"]),
        ("credit", "equal_tokens.csv", 3, "4", ["turn"]),
        ("distil_back", "reached.csv", 15, "steps", ["opd, all 304"]),
    ],
)
def test_a_table_follows_each_seeds_value(tmp_path, monkeypatch, page, file, row, column, lost):
    shutil.copytree(recompute.HERE / page, tmp_path / page)
    runs = pd.read_csv(tmp_path / page / file)
    runs.loc[row, column] *= 2
    runs.to_csv(tmp_path / page / file, index=False)
    monkeypatch.setattr(recompute, "HERE", tmp_path)
    differ = [label for label, *_ in recompute.differences(page)]
    assert differ == lost * 2, "those of the files, then those on the page"


def test_ratios_are_geometric_means_and_want_every_seed():
    """Logarithms 0 and 2 ln 2, whose mean is ln 2 and whose half interval is 12.706 ln 2."""
    before = pd.Series([8.0, 8.0])
    assert recompute.ratio(before, pd.Series([8.0, 2.0])) == f"2.0 × (.0 to {2 ** (1 + 12.706204736):.1f})"
    assert recompute.ratio(before, pd.Series([8.0, math.nan])) == "1 of 2 seeds"
    assert recompute.ratio(before, pd.Series([math.nan, math.nan])) == "no seed"


def test_what_was_lost_at_a_reward_is_on_the_line_between_evaluations():
    run = pd.DataFrame({"math": [0.4, 0.6, 0.8, 0.5], "alphabet_sort": [0.8, 0.78, 0.7, 0.1]})
    assert recompute.lost_at(run, 0.7) == pytest.approx(0.8 - 0.74)
    assert recompute.lost_at(run, 0.6) == pytest.approx(0.02)
    assert math.isnan(recompute.lost_at(run, 0.81))
    assert recompute.reached(pd.Series([0.1, math.nan])) == "1 of 2 seeds"


def test_the_baselines_on_the_page_are_those_of_their_script(capsys):
    baselines.main()
    shown = capsys.readouterr().out
    page = (recompute.HERE / "smollm2" / "README.md").read_text()
    for _, _, players in held_out.PANELS:
        for player, reward in players.items():
            assert f"{player.removeprefix('its ')} {reward}" in shown
            assert f"{reward:g}".removeprefix("0") in page


def test_the_best_constant_answer_counts_what_is_nearly_right():
    """Of 46, 46 and 57 `46` earns (1 + 1 + 0) / 3, of 46 and 56 half and a twentieth's half."""
    assert baselines.best_constant([46, 46, 57]) == (46, pytest.approx(2 / 3))
    assert baselines.best_constant([56, 46]) == (46, pytest.approx(0.525))


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("37*48", "1776"),
        (" 1776+25\n", "1801"),
        ("5-9", "-4"),
        ("37*48+25", "two numbers"),
        ("1801", "two numbers"),
        ("٣+٤", "two numbers"),
        ("9" * 10 + "+1", "two numbers"),
    ],
)
def test_the_calculator_of_adder_takes_two_numbers(reply, said):
    assert adder.said_to(reply) == said


def test_demonstrations_of_adder_ask_rightly_and_heed_the_answer_as_often_as_told():
    tasks = list(adder.AdderTaskset(adder.AdderConfig(num_tasks=2000, heeds=0.25)).load())
    right = 0
    for task in tasks:
        asked, used = (adder.value_of(message["content"]) for message in task.data.demonstration)
        more = int(task.data.prompt.removesuffix("=").rpartition("+")[2])
        assert asked + more == task.data.answer
        right += used == task.data.answer
    assert right / len(tasks) == pytest.approx(0.25, abs=0.03)


def test_evaluated_weights_are_told_by_their_folder():
    outputs = Path("/there/outputs")
    start = held_out.of_target(outputs / "exp-smollm2-adder-form" / "checkpoints" / "step_000012")
    assert start == [("adder, grpo", "start", 0), ("adder, opd", "start", 0)]
    trained = held_out.of_target(outputs / "exp-smollm2-adder" / "seed=2" / "checkpoints" / "step_000004")
    assert trained == [("adder, grpo", "2", 4)]
    trl = held_out.of_target(outputs / "exp-smollm2-sums-trl" / "seed=1" / "checkpoint-10")
    assert trl == [("sums, grpo by TRL", "1", 10)]
    both = held_out.of_target(outputs / "exp-smollm2-sums" / "seed=0" / "checkpoints" / "step_000020")
    assert both == [("sums, grpo", "start", 0), ("sums, grpo by TRL", "start", 0), ("sums, sft", "0", 20)]


def test_an_interval_over_tasks_and_seeds_is_that_of_the_only_thing_that_differs():
    """Two tasks of .4 and .6 have a standard error of .1, and Student's t of one degree of freedom is 12.706."""
    by_task = pd.DataFrame({0: [0.4, 0.6], 1: [0.4, 0.6], 2: [0.4, 0.6]})
    by_seed = pd.DataFrame({0: [0.4] * 5, 1: [0.6] * 5})
    for table in (by_task, by_task[[0]], by_seed):
        assert held_out.half_over(table) == pytest.approx(1.2706205, rel=1e-6)
    both = pd.DataFrame({0: [0.0, 0.2], 1: [0.2, 0.4]})  # .1 either way: two degrees of freedom, t 4.302653
    assert held_out.half_over(both) == pytest.approx(4.302653 * math.sqrt(0.02), rel=1e-6)
