"""METRICS.md: every key that is written is in it, with the entry that it should have."""

import ast
import inspect
import itertools
from pathlib import Path

import pytest
from metrics_page import ENTRIES, PAGE, entry_of

import prl.losses
import prl.trainer
from prl.algorithms.grpo import GRPOAlgorithm
from prl.config.orchestrator import EvalConfig
from prl.curriculum.replay import ReplayConfig
from prl.trainer.trainer import COUNTED


@pytest.mark.parametrize("key", ["reward/mean", "errors/math/rain", "pool/all/easy", "loss/other", "surprise"])
def test_a_key_that_nobody_declared_has_none(key):
    assert entry_of(key) is None


def test_no_key_is_declared_twice():
    assert len(ENTRIES) == len(set(ENTRIES)) > 50


def test_every_key_of_a_run_is_on_the_page(run_lines):
    keys = set().union(*run_lines)
    assert not [key for key in keys if entry_of(key) is None]
    of_orchestrator = PAGE[: PAGE.index("## Evaluation")]
    unwritten = {entry for entry in ENTRIES if f"| `{entry}` |" in of_orchestrator} - set(map(entry_of, keys))
    assert unwritten == {"metric/<env>/<metric>", "log/<env>/spans_of_one"}


class Logging(GRPOAlgorithm):
    def score_group(self, group):
        self.log("group", len(group))
        super().score_group(group)


@pytest.fixture
async def run_lines(make_env, zero, train):
    """The lines of a run with two envs, pools, filtering, oversampling, filters in both slots and an evaluation."""
    curriculum = {"easy_threshold": 1.0, "online_difficulty_filtering": True, "replay": ReplayConfig(share=0.5)}
    envs = [
        make_env(
            name,
            algorithm=Logging,
            held_out=2,
            curriculum=curriculum,
            pre={"zero": zero(False)},
            post={"zero": zero(True)},
        )
        for name in "ab"
    ]
    run = await train(envs, steps=3, eval=EvalConfig(every=1), oversampling_factor=1.5)
    return run.all_lines


def test_every_metric_of_the_trainer_is_on_the_page():
    """What it counts, and the string keys of what is called metrics, read from its source."""
    found = set(COUNTED)
    folders = [Path(inspect.getfile(package)).parent for package in (prl.trainer, prl.losses)]
    for path in itertools.chain.from_iterable(folder.rglob("*.py") for folder in folders):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "metrics":
                found |= {node.slice.value} if isinstance(node.slice, ast.Constant) else set()
            if (
                isinstance(node, ast.BinOp)
                and getattr(node.left, "id", "") == "metrics"
                and isinstance(node.right, ast.Dict)
            ):
                found |= {key.value for key in node.right.keys if isinstance(key, ast.Constant)}
            if isinstance(node, ast.keyword) and node.arg == "metrics" and isinstance(node.value, ast.Dict):
                found |= {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
    assert {"tokens/trained", "entropy/all/mean", "nll", "is_masked", "ref_kl/is_masked", "is_clipped"} <= found
    assert not [key for key in found if entry_of(key) is None]
