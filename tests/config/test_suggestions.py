"""Hints: what to write instead of a key or an option that there is not."""

import pytest

from prl.config.compose import options
from prl.config.suggestions import INSTEAD, hint, keys_of, override_key
from prl.launch.command import composed


@pytest.fixture(scope="module")
def config():
    return composed([], options())


@pytest.mark.parametrize(
    ("argument", "meant"),
    [
        ("training_mode=opd", "algo=opd"),
        ("advantage.type=grpo", "algo"),
        ("orchestrator.filters.gibberish.enforce=true", "filters.post_batch"),
        ("lr=1e-3", "trainer.optim.lr"),
        ("max_stepz=3", "max_steps"),
        ("trainer.optim.lrr=3", "trainer.optim.lr"),
        ("trainer.max_async_level=3", "orchestrator.max_async_level"),
        ("renderer=glm5", "renderer=glm-5"),
        ("algo=gpro", "algo=grpo"),
        ("+algo@envs.math.algo=opdd", "=opd?"),
        ("model.path=s/lr=1,seed=0/x", """'model.path="s/lr=1,seed=0/x"'"""),
    ],
)
def test_a_hint_names_what_may_have_been_meant(config, argument, meant):
    assert meant in hint(argument, config, options())


@pytest.mark.parametrize(
    "argument", ["max_steps=3", "algo=opd", "+algo@envs.b.algo=opd", "qqq.zzz=1", "loss=zzzzz", 'model.path="a=b"']
)
def test_what_is_there_or_like_nothing_has_no_hint(config, argument):
    assert hint(argument, config, options()) is None


def test_no_key_that_there_is_has_another_in_its_place(config):
    assert not set(INSTEAD) & set(keys_of(config))


@pytest.mark.parametrize(
    ("argument", "key"), [("a.b=c=d", "a.b"), ("+a@b.c=1", "a@b.c"), ("++a=1", "a"), ("~a.b", "a.b")]
)
def test_the_key_of_an_override(argument, key):
    assert override_key(argument) == key
