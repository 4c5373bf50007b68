"""A sample of `scripts/fuzz_config`: a mutated config is accepted, or refused by one line that names the key."""

import random

import pytest
from config_fuzz import DEFAULT, Case, cases, composed, outcome

SEED, SAMPLE = 21, 40
FOUND = [
    "+curriculum.hash_keys.x=1", "~envs", "loss=nonsense", "renderer=null", "~renderer", "envs.math.filters=[a]",
    "envs.math.filters={nonsense: 1}", "orchestrator.eval=${run}", "orchestrator=${run}", "sweep=${run}",
    "monitor=${run}", "envs=${run}", "teacher.engine=null", "teacher=${run}",
    "model.path='a\nb'", f"model.path={'x' * 5000}", f"teacher.model.path={'x' * 5000}", "seed=${nope}",
    "run.name='a\nb'", "run.name=' '", "run.dir='a\x1b]0;x\x07'", "orchestrator.stop.target=nan",
    "trainer.ready_timeout_s=1e-300", "envs.math.timeout_s=1e21", "algo=nonsense", "algo=null",
    "sampling.temperature=1e20", "loss.adv_tau=1e30", "loss.delta=1e300", "loss.entropy_coef=1e300",
    "trainer.optim.lr=1e300", "trainer.optim.weight_decay=1e300", "envs.math.weight=1e300",
    "envs.math.workers.memory_gb=1e30", "sampling.min_p=1e300", "engine.max_num_seqs=5000000",
    "orchestrator.group_size=50000000", "engine.kv_cache_gb=5000000", "engine.urls=[a]",
    "trainer._target_=prl.trainer.trainer.Trainr", "trainer.optim._target_=torch.optim.Adamm",
    "trainer.schedule._target_=prl.trainer.schedule.Lineary", "+trainer.optim.momentumm=1",
    "orchestrator._target_=prl.orchestrator.orchestrator.Orchestra", "weights._target_=prl.transport.files.Files",
    "launcher._target_=prl.launch.local.Local", "monitor.jsonl._target_=prl.monitors.jsonl.Json",
    "loss._target_=prl.losses.defalt_loss",
]  # fmt: skip
"""Overrides that once were taken, or ended in a traceback."""


@pytest.fixture(scope="module")
def default():
    return cases(DEFAULT, set())


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Names on the hub are looked up on this machine."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("override", FOUND, ids=lambda override: override[:40].encode("unicode_escape").decode())
def test_what_was_taken_once_is_refused_in_one_line(override, default):
    config, _ = default
    found = outcome(Case(DEFAULT, override.lstrip("+~").split("=")[0], "found", override), config)
    assert found.kind == "refused", found


def test_sampled_mutations_are_refused_in_a_line(default):
    config, every = default
    sample = random.Random(SEED).sample(every, SAMPLE)
    ended = [outcome(case, config) for case in sample]
    assert not [found for found in ended if found.kind not in ("refused", "accepted")]
    assert {found.kind for found in ended} == {"refused", "accepted"}, "the sample itself"


def test_what_is_not_mutated_is_accepted(default):
    config, _ = default
    assert outcome(Case(DEFAULT, "seed", "none", "seed=1"), config).kind == "accepted"
    assert composed(DEFAULT).seed == 0, "a case leaves the base as it was"
