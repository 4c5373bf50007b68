"""Hints: what to write instead of a retired or misspelt key."""

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

from prl import command
from prl.compose import CONF, options
from prl.compose import compose as composed
from prl.config import suggestions
from prl.config.validate import validate
from prl.launch.components import build_components


@pytest.mark.parametrize("key", sorted(suggestions.RETIRED))
def test_a_retired_key_and_all_below_it_have_a_hint(key):
    assert suggestions.retired(key) == suggestions.retired(f"{key}.anything.below") == suggestions.RETIRED[key]


def test_the_closest_retired_node_answers():
    assert "algo=grpo" in suggestions.retired("advantage.type")
    assert "credit" in suggestions.retired("advantage.clip")
    assert "filters=default" in suggestions.retired("orchestrator.filters.gibberish.enforce")
    for slot in ("pre_batch", "post_batch"):
        for key in (f"{slot}_filters", f"orchestrator.{slot}_filters.enforce"):
            assert suggestions.retired(key).startswith(f"filters.{slot}.<name>")


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        ("orchestrator.buffer.easy_threshold", "buffer.easy_threshold"),
        ("buffer.oversampling_factor", "orchestrator.oversampling_factor"),
        ("orchestrator.training_mode", "algo=opd"),
        ("orchestrator.student", "`model`"),
        ("orchestrator.client", "inference.urls"),
        ("orchestrator.length_penalty", "algo.length_penalty"),
        ("algo.advantage.type", "algo=grpo"),
        ("algo.name", "algo=grpo"),
        ("echo.observations", "algo.roles"),
        ("async_level", "orchestrator.max_async_level"),
        ("max_inflight_rollouts", "orchestrator.oversampling_factor"),
        ("trainer.enable_token_export", "trainer.token_export"),
        ("algo.sampling.temperature", "sampling.temperature"),
        ("algo.kl_coef", "algo.kl.coef"),
        ("loss.beta", "algo.kl.coef"),
        ("loss.kwargs.clip_eps", "+loss.<name>=<value>"),
    ],
)
def test_a_key_of_another_version_is_told_its_new_place(key, instead):
    assert instead in suggestions.retired(key)


@pytest.mark.parametrize(
    ("argument", "option"),
    [("renderer=glm5", "glm-5"), ("algo=gpro", "grpo"), ("filters=enforcepost", "enforce_post"), ("env=maths", "math")],
)
def test_a_misspelt_option_is_told_the_nearest(argument, option):
    group = argument.split("=")[0]
    assert suggestions.misspelt_option(argument, GROUPS) == [f"{argument}: did you mean {group}={option}?"]


@pytest.mark.parametrize(
    "argument", ["renderer=qwen3", "env=[math,guess]", "loss=zzz", "max_steps=3", "+algo@envs.b.algo=opd"]
)
def test_an_option_that_is_there_or_far_from_all_gets_no_hint(argument):
    assert suggestions.misspelt_option(argument, GROUPS) == []


FN = "prl.orchestrator.algo.advantage.overlong_penalty"
ENDPOINT = "teacher=endpoint teacher.name=big teacher.base_url=http://h/v1"
FOLLOWED = {  # one key of each hint: what somebody types who does as the hint says, some of it for all that it names
    "training_mode": ["algo=grpo", "algo=opd"],
    "orchestrator.algo": ["algo=max_rl", "algo.kl.coef=0.1"],
    "advantage": ["algo=max_rl"],
    "length_penalty": ["algo.length_penalty=tokens", "algo=reward algo.length_penalty=turns"],
    "echo": ["algo=echo", "algo=echo +algo.roles.user.alpha=0.1"],
    "algo.observations": ["algo=echo +algo.roles.user.alpha=0.1"],
    "student": ["model=tiny", "model.lr=1e-4"],
    "client": ["inference.urls=[http://127.0.0.1:8000]", "inference.max_num_seqs=8"],
    "inference.replicas": ["inference.servers=2"],
    "teacher.client": [f"algo=opd {ENDPOINT}", "algo=opd teacher=local teacher.model.path=some/folder"],
    "orchestrator.teacher": ["algo=opd teacher=local", f"algo=opd {ENDPOINT}", "algo=opd algo.teacher.name=teacher"],
    "inference.teacher": ["algo=opd teacher=local teacher.inference.threads=1"],
    "algo.model": ["algo=opd algo.teacher={name:b,base_url:http://h/v1}", "algo=sft algo.sampling.source.timeout_s=9"],
    "kl_coef": ["algo.kl.coef=0.1", "algo.kl.coef=0.1 algo.kl.reference={name:b,base_url:http://h/v1}"],
    "algo.sampling.temperature": ["sampling.temperature=0.9", "envs.math.sampling.temperature=0.9"],
    "algo.sampling.max_tokens": ["sampling.max_tokens=9", "envs.math.sampling.max_tokens=9"],
    "orchestrator.sampling": ["sampling.temperature=0.9", "sampling.max_tokens=9"],
    "orchestrator.eval.temperature": ["orchestrator.eval.sampling.temperature=0"],
    "eval": ["orchestrator.eval.every=5"],
    "orchestrator.filters": ["filters.pre_batch.gibberish.enforce=true", "filters=none", "filters=monitor"],
    "pre_batch_filters": ["filters.pre_batch.gibberish.enforce=true", "filters=enforce"],
    "post_batch_filters": ["filters.post_batch.gibberish.enforce=true", "filters=enforce_post"],
    "orchestrator.buffer": ["buffer=pools", "buffer.easy_threshold=0.9"],
    "oversampling_factor": ["orchestrator.oversampling_factor=2"],
    "online_difficulty_filtering": ["buffer.online_difficulty_filtering=true"],
    "trainer.model": ["model=tiny"],
    "model.name": ["model.path=some/folder"],
    "algo.loss": ["loss=aipo"],
    "loss.type": ["loss=gspo"],
    "loss.import_path": [f"loss=custom loss._target_={FN} +loss.max_tokens=9 +loss.buffer=1"],
    "algo.import_path": ["algo=custom_class algo._target_=prl.orchestrator.algo.reward.RewardAlgorithm"],
    "monitor.show": ["monitor.console.mode=plain"],
    "loss.kwargs": [f"loss=custom loss._target_={FN} +loss.max_tokens=9 +loss.buffer=1"],
    "algo.kwargs": [
        "algo=custom_class algo._target_=prl.orchestrator.algo.reward.RewardAlgorithm +algo.length_penalty=turns"
    ],
    "algo.fn.kwargs": [f"algo=custom algo.fn._target_={FN} +algo.fn.max_tokens=9 +algo.fn.buffer=1"],
    "algo.filter.kwargs": [f"algo=echo algo.filter._target_={FN} +algo.filter.max_tokens=9 +algo.filter.buffer=1"],
    "renderer.args": ["renderer=qwen3 +renderer.thinking_retention=all"],
    "trainer.loss": ["loss=aipo", "loss.kl_tau=0"],
    "batch_size": ["orchestrator.batch_size=16"],
    "group_size": ["orchestrator.group_size=2"],
    "max_inflight_rollouts": ["orchestrator.max_async_level=2", "orchestrator.oversampling_factor=2"],
    "async_level": ["orchestrator.max_async_level=2"],
    "max_off_policy_steps": ["orchestrator.max_off_policy_steps=9"],
    "lr": ["trainer.optim.lr=1e-3"],
    "trainer.optim.max_grad_norm": ["trainer.max_grad_norm=2"],
    "trainer.optim.type": ["trainer.optim._target_=torch.optim.SGD"],
    "checkpoint_every": ["checkpoint.every=5"],
    "hydra.run.dir": ["run.dir=here"],
    "resume": ["run.resume=auto"],
    "seq_len": ["trainer.seq_len=256"],
    "trainer.enable_token_export": ["trainer.token_export=true"],
    "monitor.wandb_project": ["monitor=wandb monitor.wandb.project=mine"],
    "wandb": ["monitor=wandb", "monitor=wandb monitor.wandb.mode=offline"],
    "env.id": ["envs.math.taskset=prl.envs.math"],
    "environment": ["env=math", "env=[math,reverse_text]"],
}


def accepted(*overrides):
    """Compose a config and build its components: what is refused before a model is looked at."""
    config = composed(["run.name=x", *overrides])
    validate(config)
    build_components(config)


def test_every_hint_is_followed_below():
    assert {suggestions.RETIRED[key] for key in FOLLOWED} == set(suggestions.INSTEAD) and len(FOLLOWED) == len(
        suggestions.INSTEAD
    )


@pytest.mark.parametrize(("key", "typed"), [(key, typed) for key, each in FOLLOWED.items() for typed in each])
def test_what_a_hint_says_is_accepted(key, typed, monkeypatch):
    monkeypatch.setenv("PRL_TOKEN", "t")
    hint = suggestions.RETIRED[key]
    *_, last = typed.split()
    parts = suggestions.override_key(last).replace("math", "<name>").split(".")
    assert any(".".join(parts[:end]) in hint for end in range(1, len(parts) + 1)), "it is what the hint names"
    accepted(*typed.split())


@pytest.mark.parametrize(
    "arguments",
    [
        "algo.length_penalty.type=tokens",
        "+algo@envs.math.algo=max_rl envs.math.algo.length_penalty.type=turns",
        "algo.normalize.type=std",
        f"algo=echo +algo.filter.max_tokens=9 +algo.filter.buffer=1 algo.filter.import_path={FN}",
        f"algo=custom +algo.fn.max_tokens=9 +algo.fn.buffer=1 algo.fn.import_path={FN}",
        "algo=echo algo.roles.user.alpha=0.5",
        f"algo=custom algo.fn._target_={FN} +algo.fn.max_tokens=9 algo.fn.buffer=2",
        "inference.args.block-size=16",
    ],
)
def test_what_is_said_of_a_key_that_is_not_there_is_accepted_as_it_is_written(arguments):
    *others, argument = arguments.split()
    first = misspelt(argument, *others)[0]
    accepted(*others, first.split(": ")[-1])


@pytest.mark.parametrize("key", ["orchestrator", "orchestrator.batch_size", "algo", "loss", "model.path", "teachers"])
def test_living_keys_are_not_retired(key):
    assert suggestions.retired(key) is None


def test_no_key_of_the_config_is_retired():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        keys = suggestions.flatten(compose("train"))
    assert len(keys) > 80 and "trainer.optim.lr" in keys
    assert [key for key in keys if suggestions.retired(key)] == []


GROUPS = options()


def misspelt(argument, *others):
    """The hints for the last argument of a command line."""
    return suggestions.misspelt(argument, command.composed([*others, argument], set(GROUPS)), set(GROUPS))


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("max_stepz", "max_steps"),
        ("orchestrator.batchsize", "orchestrator.batch_size"),
        ("trainer.optim.lrs", "trainer.optim.lr"),
        ("trainer.lr", "trainer.optim.lr"),
        ("temperature", "sampling.temperature"),
        ("sampling.temprature", "sampling.temperature"),
        ("orchestator.batch_size", "orchestrator.batch_size"),
        ("envs.math.timeouts", "envs.math.timeout_s"),
    ],
)
def test_a_misspelt_key_is_told_what_it_may_have_meant(key, meant):
    first = misspelt(f"{key}=1")[0]
    assert first.startswith(f"{key}: did you mean ") and meant in first


def test_the_keys_that_there_are_come_with_it():
    assert misspelt("trainer.optim.rate=1")[-1] == "keys of trainer.optim: betas, eps, fused, lr, parts, weight_decay"
    assert misspelt("trainer.optim.lr.x=1")[-1] == misspelt("trainer.optim.rate=1")[-1], "lr has none"
    top = misspelt("qqqq=1")[-1]
    assert top.startswith("keys of the top level: algo, buffer, checkpoint, dry_run, envs") and "_target_" not in top


@pytest.mark.parametrize(
    "argument",
    [
        "trainer.optim.lr=1",
        "env=math",
        "algo=grpo",
        "env@envs.b=math",
        "hydra/launcher=basic",
        "hydra.run.dir=x",
        "+algo.x=1",
        "buffer={easy_threshold: 1}",
        "envs.math.eval_args=null",
        "trainer.optim=${other}",
    ],
)
def test_what_exists_gets_no_hint(argument):
    assert misspelt(argument) == []


MATH = (
    "algo, args, buffer, eval_args, filters, group_size, group_timeout_s, in_process, loss, renderer, "
    "sampling, taskset, timeout_s, weight, worker_memory_gb"
)


@pytest.mark.parametrize(
    ("arguments", "first", "last"),
    [
        (
            "env=guess envs.guess.args.max_sise=30",
            "envs.guess.args.max_sise: did you mean envs.guess.args.max_size or",
            "keys of envs.guess.args: max_size, min_size, num_tasks, seed, slack, split",
        ),
        (
            "algo=echo algo.rolls=1",
            "algo.rolls: did you mean algo.roles",
            "keys of algo: baseline, completion_weight, filter, ",
        ),
        (
            "env=[math,reverse_text] envs.reverse_text.algo.name=opd",
            "envs.reverse_text.algo.name: an env's own algo is chosen with +algo@envs.reverse_text.algo=<name>",
            f"keys of envs.reverse_text: {MATH}",
        ),
        (
            "+env@envs.b=guess +algo@envs.b.algo=opd envs.b.algo.teecher=1",
            "envs.b.algo.teecher: did you mean envs.b.algo.teacher",
            "keys of envs.b.algo: kl, max_concurrent, sampling, teacher",
        ),
        (
            "experiment=mixed_grpo_opd envs.reverse_text.algo.teecher=1",
            "envs.reverse_text.algo.teecher: did you mean envs.reverse_text.algo.teacher",
            "keys of envs.reverse_text.algo: kl, max_",
        ),
        (
            "env=nope algo=opd env.x=1 algo.teecher=1",
            "algo.teecher: did you mean algo.teacher",
            "keys of algo: kl, max_concurrent, ",
        ),
        (
            "env=math,guess envs.math.wait=1",
            "envs.math.wait: did you mean envs.math.weight",
            f"keys of envs.math: {MATH}",
        ),
    ],
)
def test_the_keys_are_those_of_the_options_that_were_chosen(arguments, first, last):
    *others, argument = arguments.split()
    found = misspelt(argument, *others)
    assert found[0].startswith(first) and found[-1].startswith(last)


@pytest.mark.parametrize("argument", ["seed", "~seed", "+seed", "~loss.kl_tau", "env", "~env", ""])
def test_what_has_no_value_gets_no_hint(argument):
    assert suggestions.misspelt_option(argument, options()) == []
    assert suggestions.misspelt(argument, command.composed([], options()), options()) == []


def test_options_may_lie_on_a_search_path_of_ones_own(tmp_path):
    (tmp_path / "algo").mkdir()
    (tmp_path / "algo" / "mine.yaml").write_text("defaults: [/schema/algo@_here_: opd, _self_]\n")
    found = misspelt("algo.max_concurent=3", "algo=mine", f"hydra.searchpath=[file://{tmp_path}]")
    assert found == [
        "algo.max_concurent: did you mean algo.max_concurrent?",
        "keys of algo: kl, max_concurrent, sampling, teacher",
    ]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ("algo=echo algo.roles.user.alpha=0.5", "takes a +: +algo.roles.user.alpha=0.5"),
        ("algo=custom algo.fn.scale=2", "takes a +: +algo.fn.scale=2"),
        ("inference.args.block-size=16", "takes a +: +inference.args.block-size=16"),
        ("algo.length_penalty.type=tokens", "it takes a value: algo.length_penalty=tokens"),
        ("algo.length_penalty.weight=2", "it takes a value: algo.length_penalty=<value>"),
        (
            "+algo@envs.math.algo=max_rl envs.math.algo.length_penalty.type=turns",
            ": envs.math.algo.length_penalty=turns",
        ),
        ("trainer.threads.trainer=2", "it takes a value: trainer.threads=<value>"),
        ("algo=echo algo.filter.import_path=my.keep", "dotted path: algo.filter._target_=my.keep"),
        ("algo=custom algo.fn.import_path=my.credit", "dotted path: algo.fn._target_=my.credit"),
        ("algo=custom algo.fn=x", "algo.fn: did you mean algo.fn._target_?"),
        ("trainer.optim=adam", "trainer.optim: did you mean trainer.optim._target_?"),
    ],
)
def test_what_to_write_is_said_and_nothing_else(arguments, hint):
    *others, argument = arguments.split()
    (found,) = misspelt(argument, *others)
    assert found.endswith(hint)


def test_a_frozen_model_has_its_four_keys_and_takes_no_other():
    for arguments in ("algo=opd algo.teacher.client=x", "algo=sft algo.sampling.source.client=x"):
        *others, argument = arguments.split()
        assert not any("takes a +" in hint for hint in misspelt(argument, *others))


def test_what_the_key_lies_in_is_not_what_was_meant():
    keys = "adv_tau, agg_mode, constant_length, delta, dppo_mask_high, dppo_mask_low, entropy_coef, kl_tau"
    assert misspelt("loss.x=3") == [f"keys of loss: {keys}"]


def test_a_run_that_does_not_compose_is_told_with_its_own_options(capsys, monkeypatch):
    monkeypatch.setattr(command, "_started", False)
    monkeypatch.setenv(command.FULL_ERROR, "")  # put back afterwards

    def as_hydra():
        raise HydraException("Could not override 'envs.guess.args.max_sise'.\nNo such key")

    with pytest.raises(SystemExit) as ended:
        command.run(as_hydra, ["env=guess", "envs.guess.args.max_sise=30"])
    first, *hints = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert first == "error: Could not override 'envs.guess.args.max_sise': No such key"
    assert any(hint.startswith("keys of envs.guess.args: max_size") for hint in hints)


@pytest.mark.parametrize(("argument", "key"), [("a.b=1", "a.b"), ("+a=1", "a"), ("++a.b=c=d", "a.b"), ("~a=1", "a")])
def test_the_key_of_an_override(argument, key):
    assert suggestions.override_key(argument) == key


def test_a_job_that_fails_after_it_has_started_gets_no_hint(capsys, monkeypatch):
    monkeypatch.setattr(command, "_started", False)

    def job():
        with command.errors_as_exit_codes():
            raise SystemExit(1)

    with pytest.raises(SystemExit):
        command.run(job, ["max_stepz=3"])
    assert capsys.readouterr().err == ""


def test_a_retired_key_ends_before_the_job(capsys):
    with pytest.raises(SystemExit) as ended:
        command.run(lambda: pytest.fail("the job ran"), ["+orchestrator.teacher.base_url=http://x"])
    assert ended.value.code == 2
    assert (
        "there is no 'orchestrator.teacher.base_url' here: a teacher belongs to the algorithm"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["env=null"], "env=null: choose an option of env"),
        (["loss="], "loss=: choose an option of loss"),
        (
            ["experiment=null"],
            "experiment=null: choose an option of experiment, or leave it out: there is none by default",
        ),
        (["env=[math,math]"], "an option stands there twice"),
        (["env=math", "env=reverse_text"], "env is given twice; for several envs write env=[a,b]"),
        (
            ["algo=ref_kl"],
            "there is no algo=ref_kl: ref_kl is a loss component; the algorithms that feed it are algo=opd",
        ),
        (["monitor=default"], "monitor=wandb adds Weights & Biases"),
        (["filters={pre_batch:{}}", "filters.post_batch= {a: 1}"], None),
        (["filters.post_batch.gibberish={enforce: true}", "filters=none", "buffer={easy_threshold: 1}"], None),
        (["env=[math,reverse_text]", "seed=1", "seed=2", "trainer.token_export=null"], None),
    ],
)
def test_options_of_groups(arguments, problem, capsys):
    found = suggestions.misused_groups(arguments, GROUPS)
    assert found is None if problem is None else problem in found
    if problem is not None:
        with pytest.raises(SystemExit):
            command.run(lambda: pytest.fail("the job ran"), arguments)
        assert problem in capsys.readouterr().err
