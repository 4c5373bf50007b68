"""Splits and seeds of the envs that make their tasks, and the settings that each refuses."""

import pytest

from prl.base.errors import ConfigError
from prl.config.schema import EnvConfig
from prl.envs.environment import Environment, load_taskset
from prl.envs.tasksets.base import held_out

TASKSETS = {
    "math": ({"max_operand": 9}, lambda data: data.prompt.removesuffix("=")),
    "math_retry": ({"max_operand": 9}, lambda data: data.prompt.removesuffix("=")),
    "calculator": ({"operands": 2, "max_operand": 9}, lambda data: data.prompt.removesuffix("=")),
    "reverse_text": ({"max_length": 4}, lambda data: data.prompt.removeprefix("reverse: ")),
    "guess": ({"max_size": 30}, lambda data: f"{data.prompt}: {data.secret}"),
    "alphabet_sort": ({}, lambda data: " ".join(sorted(data.prompt.split()[1:]))),
    "reasoning_gym": ({}, lambda data: data.prompt),
}
"""Arguments that make few tasks, and the text that assigns a task to a split."""


def tasks(name, **args):
    return list(load_taskset(f"prl.envs.tasksets.{name}", args, "envs.e.args"))


@pytest.mark.parametrize("name", TASKSETS)
def test_splits_share_no_task_whatever_the_seed(name):
    args, identity = TASKSETS[name]
    train, held = (
        {identity(task.data) for seed in (0, 1) for task in tasks(name, split=split, seed=seed, num_tasks=300, **args)}
        for split in ("train", "eval")
    )
    assert train and held and not train & held
    assert all(map(held_out, held)) and not any(map(held_out, train))


def test_the_split_is_pinned():
    """A changed hash would leak eval tasks into what the committed models were trained on."""
    assert [b for b in range(40) if held_out(f"7+{b}")] == [12, 17, 19, 22, 30, 34]


@pytest.mark.parametrize("name", TASKSETS)
def test_the_seed_decides_which_tasks_are_drawn(name):
    first, again, other = ([task.data for task in tasks(name, num_tasks=50, seed=seed)] for seed in (7, 7, 8))
    assert first == again != other and len({data.id for data in first}) == 50


@pytest.mark.parametrize("name", ["math", "guess", "alphabet_sort", "reverse_text", "kuhn_poker", "calculator"])
def test_graders_of_prls_own_envs_are_quick(name):
    config = EnvConfig(taskset=f"prl.envs.tasksets.{name}", args={"num_tasks": 2})
    assert Environment(name, config, eval_tasks=0).workers is None


REFUSED = [
    ("alphabet_sort", {"max_words": 2}, "max_words=2 is below min_words=3"),
    (
        "alphabet_sort",
        {"min_letters": 1, "max_letters": 1, "max_words": 23},
        "take 27 different words, and there are 26",
    ),
    ("calculator", {"operands": 11}, "operands"),
    ("guess", {"max_size": 1_000_000_000}, "max_size"),
    ("kuhn_poker", {"opponent": "nobody"}, "opponent"),
    ("math", {"split": "test"}, "split"),
    ("judge", {"path": "rows.jsonl", "best": 0}, "best"),
    ("math", {"num_task": 5}, "num_task"),
    ("reasoning_gym", {"dataset": "chian_sum"}, "no generator 'chian_sum'; there are chain_sum"),
    ("reasoning_gym", {"dataset": "composite"}, "composite is left out: it mixes others"),
    ("reasoning_gym", {"dataset": "puzzle24"}, "evaluates the reply"),
    ("reasoning_gym", {"config": {"chain_sum": {"min_term": 2}}}, "unexpected keyword argument 'min_term'"),
    ("reasoning_gym", {"config": {"chain_sum": {"min_terms": 9}}}, "max_terms must be >= min_terms"),
    ("reasoning_gym", {"config": {"min_terms": 2}}, r"config\.min_terms"),
    (  # a target that no three numbers of one reach
        "reasoning_gym",
        {"dataset": "countdown", "config": {"countdown": {"max_numbers": 4, "max_value": 1, "min_target": 99}}},
        "countdown cannot generate with these settings",
    ),
]


@pytest.mark.parametrize(("name", "args", "named"), REFUSED)
def test_impossible_setting_is_refused_by_name(name, args, named):
    with pytest.raises(ConfigError, match=rf"^envs\.e\.args.*{named}"):
        Environment("e", EnvConfig(taskset=f"prl.envs.tasksets.{name}", args=args), eval_tasks=0)
