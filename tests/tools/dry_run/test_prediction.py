"""A dry run: what it says of a config and what it refuses, on this and on other machines."""

import copy
from types import SimpleNamespace

import pytest
from prepared_run import planned, validated
from small_models import QWEN3_32B

from prl.base.errors import ConfigError
from prl.config import hardware
from prl.config.compose import compose
from prl.config.hardware import GIB, MachineConfig
from prl.launch.components import build_components
from prl.tools.dry_run.prediction import COMMAND, ENGINE, RAM, TRAINER, predict
from prl.tools.dry_run.shape import shape_of
from prl.train import main as dry_run

GPUS = {"gpus": 8, "gpu_memory_gb": 80.0, "ram_gb": 2000.0, "cores": 64}
ON_GPUS = ("machine.gpus=8", "machine.gpu_memory_gb=80")


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """This machine has 16 GiB, two cores and no GPU."""

    monkeypatch.setattr(hardware, "memory_bytes", lambda: 16 * GIB)
    monkeypatch.setattr(hardware, "cores", lambda: 2)
    monkeypatch.setattr(hardware, "listed", lambda: ())


@pytest.fixture
def dry(config, tmp_path):
    config.dry_run, config.run.dir = True, str(tmp_path / "run")
    return config


LARGE = QWEN3_32B | {"num_hidden_layers": 8, "intermediate_size": 8 * 25600, "num_key_value_heads": 64}
"""About as many parameters and as large a KV cache, in fewer layers, which are quicker to count."""


@pytest.fixture
def large(dry, bare):
    """A model of 32B, without weights, on a machine with 8 GPUs."""
    dry.model.path, dry.model.max_model_len = str(bare("qwen3", **LARGE)), 4096
    dry.trainer.seq_len = 4096
    dry.machine = MachineConfig(**GPUS)
    return dry


def policy_of(config):
    return shape_of(config.model, "model.path", lora=config.model.lora, trained=True)


def predicted(config):
    """The prediction for a config of the default env, whose tasks take no part in it."""
    references = build_components(config).references
    run = SimpleNamespace(config=config, plan=planned(config), components=SimpleNamespace(references=references))
    return predict(run)


def parts_of(config, name, device=RAM):
    """What each process of a name holds on a device."""
    return [parts for process, parts in predicted(config).processes[device] if process == name]


def test_the_default_run_fits_and_leaves_nothing(dry, tmp_path, capsys):
    dry_run(dry)
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == "fits" and not list(tmp_path.iterdir())
    assert "524,288" in printed and "of 16.00" in printed
    assert max(map(len, printed.splitlines())) <= 160 and "\x1b" not in printed
    assert "env math, its first task as it was read:\n  user: " in printed


def test_memory_is_that_of_all_processes(dry):
    found, parameters = predicted(dry), policy_of(dry).parameters
    processes = dict(found.processes[RAM])
    assert list(processes) == ["orchestrator", "engine", "trainer"] and found.capacities == {RAM: 16 * GIB}
    engine, trainer = processes["engine"], processes["trainer"]
    assert engine["weights"] == trainer["weights"] == trainer["gradients"] == 4 * parameters
    assert engine["KV cache"] == GIB
    assert [parts["process"] for parts in processes.values()] == [COMMAND, ENGINE, TRAINER]
    assert found.used(RAM) == pytest.approx(sum(sum(parts.values()) for parts in processes.values()))


def test_engines_and_ranks_take_their_memory_each(dry, monkeypatch):
    states = 16 * policy_of(dry).parameters
    dry.trainer.num_processes, dry.trainer.shard_size = 3, 1
    copies = predicted(dry).used(RAM)
    assert [parts["gathered"] > 0 for parts in parts_of(dry, "trainer")] == [True] * 3
    dry.trainer.shard_size = None
    assert copies - predicted(dry).used(RAM) == pytest.approx(2 * states), "one copy, not three"
    one, [parts] = predicted(dry).used(RAM), parts_of(dry, "engine")
    dry.engine.servers = 2
    assert predicted(dry).used(RAM) - one == pytest.approx(sum(parts.values()))
    monkeypatch.setenv("PRL_TOKEN", "t")
    dry.engine.servers, dry.engine.urls = 1, ["http://127.0.0.1:9"]
    assert one - predicted(dry).used(RAM) == pytest.approx(sum(parts.values())) and not predicted(dry).caches


def test_a_kl_to_the_initial_model_copies_the_weights(dry):
    before = predicted(dry).used(RAM)
    dry.algo["kl"] = {"coef": 0.1, "reference": "initial"}
    assert predicted(dry).used(RAM) - before == 4 * policy_of(dry).parameters
    dry.algo["kl"] = {"coef": 0.1, "reference": {"name": "a", "base_url": "http://127.0.0.1:9/v1"}}
    assert predicted(dry).used(RAM) == before
    dry.algo["kl"] = {"coef": 0.1, "reference": "ema"}
    dry.envs["other"] = copy.deepcopy(dry.envs["math"])
    dry.envs["other"].algo = {"_target_": "prl.algorithms.opsd.OPSDAlgorithm", "reference": "lagged"}
    assert predicted(dry).used(RAM) - before == 2 * 4 * policy_of(dry).parameters


def test_adapters_alone_have_gradients_and_a_state(dry):
    full = policy_of(dry)
    dry.model.lora.rank = 4
    adapters, policy = 4 * 4 * (2 * (128 + 128) + 2 * (128 + 64) + 3 * (128 + 384)), policy_of(dry)
    assert policy.adapters == adapters and policy.parameters == full.parameters
    [parts] = parts_of(dry, "trainer")
    assert parts["weights"] == 4 * (full.parameters + adapters)
    assert parts["gradients"] == 4 * adapters and parts["optimiser"] == 8 * adapters


def test_a_hosted_teacher_is_an_engine_of_its_own():
    config = compose(["run.name=x", "algo=opd", "dry_run=true", "teacher.engine.kv_cache_gb=3"])
    [parts] = parts_of(config, "teacher")
    assert (
        parts["KV cache"] == 3 * GIB
        and parts["weights"] == 4 * shape_of(config.teacher.model, "m", trained=False).parameters
    )
    assert list(predicted(config).caches) == ["engine", "teacher"]


def test_an_engine_in_the_runs_process_is_left_out():
    found = predicted(compose(["run.name=x", "debug=fast", "dry_run=true"]))
    assert [name for name, _ in found.processes[RAM]] == ["orchestrator", "trainer"] and not found.caches


def test_servers_and_ranks_have_gpus_of_their_own(large):
    large.trainer.num_processes, large.engine.servers, large.engine.tensor_parallel_size = 4, 2, 2
    large.trainer.shard_size = 2
    found, parameters = predicted(large), policy_of(large).parameters
    names = [[name for name, _ in found.processes[f"GPU {place}"]] for place in range(8)]
    assert names == [["engine"]] * 4 + [["trainer"]] * 4
    assert parts_of(large, "engine") == [{"process": ENGINE}] * 2, "in RAM its code alone"
    [engine] = parts_of(large, "engine", "GPU 1")
    assert sum(engine.values()) == pytest.approx(0.5 * 80 * GIB)
    assert engine["weights"] == parameters * 2 / 2
    assert [parts.get("loading", 0) for parts in parts_of(large, "trainer")] == [4 * parameters, 0, 0, 0]
    assert parts_of(large, "trainer", "GPU 7")[0]["weights"] == 2 * parameters


def test_offloaded_states_are_in_the_machines_memory(large):
    large.trainer.num_processes, large.trainer.cpu_offload = 7, True
    [rank] = parts_of(large, "trainer", "GPU 1")
    assert not {"weights", "gradients", "optimiser"} & rank.keys()
    assert parts_of(large, "trainer")[-1].keys() >= {"weights", "gradients", "optimiser"}


def change(config, key, value):
    *path, name = key.split(".")
    node = config
    for part in path:
        node = getattr(node, part)
    setattr(node, name, value)


@pytest.mark.parametrize(
    ("fixture", "changes", "keys"),
    [
        ("dry", {"machine.ram_gb": 6, "engine.kv_cache_gb": 5}, ["RAM", "engine.kv_cache_gb"]),
        ("dry", {"trainer.tokens_per_forward": 1 << 19}, ["RAM", "trainer.tokens_per_forward"]),
        ("large", {"machine.gpus": 0, "machine.ram_gb": 9000}, ["KV cache", "4,096", "engine.kv_cache_gb"]),
        ("large", {"engine.tensor_parallel_size": 2, "trainer.num_processes": 6}, ["GPU 2", "trainer.cpu_offload"]),
        ("large", {"machine.gpu_memory_gb": None}, ["machine.gpu_memory_gb"]),
    ],
)
def test_what_does_not_fit_is_refused_with_its_key(request, tmp_path, capsys, fixture, changes, keys):
    config = request.getfixturevalue(fixture)
    for key, value in changes.items():
        change(config, key, value)
    with pytest.raises(ConfigError) as caught:
        dry_run(config)
    assert all(key in str(caught.value) for key in keys), str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} <= {"bare"}
    assert ("orchestrator" in capsys.readouterr().out) == (keys != ["machine.gpu_memory_gb"]), "the table before it"


def test_only_dry_runs_assume_a_machine_and_miss_weights(dry, bare):
    dry.model.path, dry.machine = str(bare("llama")), MachineConfig(gpus=1)
    validated(dry)
    dry.dry_run = False
    with pytest.raises(ConfigError, match="dry_run=true"):
        validated(dry)
    dry.machine = MachineConfig()
    with pytest.raises(ConfigError, match="weights"):
        validated(dry)
