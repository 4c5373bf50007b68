"""A module of the user's own, outside the tree: an algorithm and a filter as plain classes with knobs."""

import sys

import pytest

from prl.config.build import build
from prl.errors import ConfigError
from prl.orchestrator.algo.base import Algorithm
from prl.orchestrator.filters.base import Filter, apply_filters, build_filters

MODULE = '''
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

from prl.errors import ConfigError
from prl.orchestrator.algo.grpo import GRPOAlgorithm
from prl.orchestrator.filters.base import Filter


class Bonus(GRPOAlgorithm):
    """Adds a bonus to the advantage of the rollouts with the group's best reward."""

    def __init__(self, *, bonus: Annotated[float, Gt(0)] = 1.0, **knobs):
        super().__init__(**knobs)
        self.bonus = bonus

    def check(self, where):
        super().check(where)
        if self.bonus > 10:
            raise ConfigError(f"{where}.bonus={self.bonus:g} drowns the reward")

    def score_group(self, group):
        super().score_group(group)
        best = max(rollout.reward for rollout in group)
        for rollout in group:
            if rollout.reward == best:
                rollout.assign_advantages([a + self.bonus for a in rollout.advantages])


@dataclass(kw_only=True)
class TooShort(Filter):
    """Matches rollouts with fewer sampled tokens than `least`."""

    least: Annotated[int, Ge(1)] = 2

    def matches(self, rollout):
        return sum(sum(sample.mask) for sample in rollout.samples) < self.least
'''


@pytest.fixture
def outside(tmp_path, monkeypatch):
    (tmp_path / "somebodys.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "somebodys"
    sys.modules.pop("somebodys", None)


async def test_an_algorithm_with_a_knob_of_its_own_beside_those_it_inherits(outside, make_rollout, credit, play):
    algorithm = build({"_target_": f"{outside}.Bonus", "bonus": 2, "length_penalty": None}, Algorithm, "algo")
    group = await play(algorithm, [make_rollout(1.0), make_rollout(0.0)])
    assert [credit(rollout) for rollout in group] == [0.5 + 2.0, -0.5]


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"bonus": 0}, "algo.bonus="),
        ({"bonus": 11}, "algo.bonus=11 drowns the reward"),
        ({"bnus": 1}, "algo.bnus: Bonus has no such option; did you mean algo.bonus?"),
        ({"length_penalty": "chars"}, "algo.length_penalty=chars: "),
    ],
)
def test_its_refusals_read_like_those_of_the_project(outside, knobs, message):
    with pytest.raises(ConfigError) as caught:
        build({"_target_": f"{outside}.Bonus", **knobs}, Algorithm, "algo")
    assert str(caught.value).startswith(message)


def test_a_filter_with_a_knob_of_its_own(outside, make_rollout):
    node = {"_target_": f"{outside}.TooShort", "least": 3, "enforce": True}
    filters = build_filters({"short": node}, "filters.pre_batch")
    short, long = make_rollout(lengths=(3,)), make_rollout(lengths=(4,))  # two and three sampled tokens
    apply_filters({"pre_batch": filters}, "pre_batch", [short, long])
    assert (short.outcome.source, long.outcome) == ("short", None)
    with pytest.raises(ConfigError, match="^filters.pre_batch.short.least="):
        build({**node, "least": 0}, Filter, "filters.pre_batch.short")
