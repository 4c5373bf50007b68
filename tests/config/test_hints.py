"""Hints: what to write instead of a retired or misspelt key."""

import pytest
from hydra import compose, initialize_config_dir

from prl.config import hints
from prl.train import CONF


@pytest.mark.parametrize("key", sorted(hints.RETIRED))
def test_a_retired_key_and_all_below_it_have_a_hint(key):
    assert hints.retired(key) == hints.retired(f"{key}.anything.below") == hints.RETIRED[key]


def test_the_closest_retired_node_answers():
    assert "algo=<name>" in hints.retired("advantage.type")
    assert "credit" in hints.retired("advantage.clip")
    assert "filters=default" in hints.retired("orchestrator.filters.gibberish.enforce")
    for slot in ("pre_batch", "post_batch"):
        for key in (f"{slot}_filters", f"orchestrator.{slot}_filters.enforce"):
            assert hints.retired(key).startswith(f"filters.{slot}.<name>")


@pytest.mark.parametrize("key", ["orchestrator.buffer.easy_threshold", "orchestrator.oversampling_factor"])
def test_the_buffer_has_a_node_of_its_own(key):
    assert "buffer." in hints.retired(key)


@pytest.mark.parametrize("key", ["orchestrator", "orchestrator.batch_size", "algo", "loss", "model.path", "teachers"])
def test_living_keys_are_not_retired(key):
    assert hints.retired(key) is None


def test_no_key_of_the_config_is_retired():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        keys = hints.flatten(compose("train"))
    assert len(keys) > 80 and "trainer.optim.lr" in keys
    assert [key for key in keys if hints.retired(key)] == []


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("max_stepz", "max_steps"),
        ("orchestrator.batchsize", "orchestrator.batch_size"),
        ("trainer.optim.lrs", "trainer.optim.lr"),
        ("trainer.lr", "trainer.optim.lr"),
        ("temperature", "algo.sampling.temperature"),
        ("algo.sampling.temprature", "algo.sampling.temperature"),
        ("orchestator.batch_size", "orchestrator.batch_size"),
        ("envs.math.timeouts", "envs.math.timeout_s"),
    ],
)
def test_a_misspelt_key_is_told_what_it_may_have_meant(key, meant):
    first = hints.misspelt(key, CONF)[0]
    assert first.startswith(f"{key}: did you mean ") and meant in first


def test_the_keys_that_there_are_come_with_it():
    assert hints.misspelt("trainer.optim.rate", CONF)[-1] == "keys of trainer.optim: betas, eps, lr, max_grad_norm, weight_decay"
    top = hints.misspelt("qqqq", CONF)[-1]
    assert top.startswith("keys of the top level: algo, buffer, envs") and "_target_" not in top


@pytest.mark.parametrize("key", ["trainer.optim.lr", "env", "algo", "env@envs.b", "hydra/launcher"])
def test_what_exists_gets_no_hint(key):
    assert hints.misspelt(key, CONF) == []


@pytest.mark.parametrize(
    ("argument", "key"), [("a.b=1", "a.b"), ("+a=1", "a"), ("++a.b=c=d", "a.b"), ("~a=1", "a")]
)
def test_the_key_of_an_override(argument, key):
    assert hints.override_key(argument) == key


def test_a_job_that_fails_after_it_has_started_gets_no_hint(capsys, monkeypatch):
    monkeypatch.setattr(hints, "_started", False)

    def job():
        hints.job_started()
        raise SystemExit(1)

    with pytest.raises(SystemExit):
        hints.run(job, ["max_stepz=3"], CONF)
    assert capsys.readouterr().err == ""


def test_a_retired_key_ends_before_the_job(capsys):
    with pytest.raises(SystemExit) as ended:
        hints.run(lambda: pytest.fail("the job ran"), ["+orchestrator.teacher.base_url=http://x"], CONF)
    assert ended.value.code == 2
    assert "there is no 'orchestrator.teacher.base_url' here: a teacher belongs to the algorithm" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["env=null"], "env=null: choose an option of env"),
        (["loss="], "loss=: choose an option of loss"),
        (["env=[math,math]"], "an option stands there twice"),
        (["env=math", "env=reverse_text"], "env is given twice; for several envs write env=[a,b]"),
        (["filters={pre_batch:{}}"], "filters={pre_batch:{}}: this would add to the filters that are there; to set a slot anew"),
        (["filters.pre_batch={}"], "filters.pre_batch={}: this would add"),
        (["+filters.post_batch= {a: 1}"], "write filters=none and +schema/filter@filters.<slot>.<name>=<name> for each"),
        (["filters.post_batch.gibberish={enforce: true}", "filters=none", "buffer={easy_threshold: 1}"], None),
        (["env=[math,reverse_text]", "seed=1", "seed=2", "experiment=null", "trainer.checkpoint_every=null"], None),
    ],
)
def test_options_of_groups(arguments, problem, capsys):
    groups = {path.name for path in CONF.iterdir() if path.is_dir()}
    found = hints.misused_groups(arguments, groups)
    assert found is None if problem is None else problem in found
    if problem is not None:
        with pytest.raises(SystemExit):
            hints.run(lambda: pytest.fail("the job ran"), arguments, CONF)
        assert problem in capsys.readouterr().err
