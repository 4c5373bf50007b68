"""A dry run: what it says of a config, what it refuses and the setting that it names, on this and on other machines."""

import copy

import pytest
import yaml
from small_models import QWEN3_32B

from prl.config import hardware, machine
from prl.config.hardware import GIB, MachineConfig, assuming
from prl.dry_run.advice import changed
from prl.dry_run.command import dry_run
from prl.dry_run.memory import kv_bytes_per_token
from prl.dry_run.plan import COMMAND, ENGINE, RAM, TRAINER, Sizes, holds_reference, plan, ranks
from prl.errors import ConfigError

SIZES_06B = QWEN3_32B | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
GPUS = {"gpus": 8, "gpu_memory_gb": 80.0, "ram_gb": 2000.0, "cores": 64}


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """This machine has 16 GiB, two cores and no GPU."""
    monkeypatch.setattr(machine, "memory_bytes", lambda: _assumed("ram_gb", 16) * GIB)
    monkeypatch.setattr(machine, "cores", lambda: int(_assumed("cores", 2)))
    monkeypatch.setattr(hardware, "listed", lambda: [])
    monkeypatch.setattr("prl.config.validate.shutil.which", lambda name: None)


def _assumed(name, otherwise):
    given = getattr(hardware.assumed(), name)
    return otherwise if given is None else given


@pytest.fixture
def dry(config, tmp_path):
    config.dry_run, config.run.dir = True, str(tmp_path / "run")
    return config


@pytest.fixture
def large(dry, bare):
    """Qwen3-32B, without weights, on a machine with 8 GPUs."""
    dry.model.path, dry.model.max_model_len = str(bare("qwen3", **QWEN3_32B)), 4096
    dry.trainer.seq_len = 4096
    dry.machine = MachineConfig(**GPUS)
    return dry


def refused(config):
    with pytest.raises(ConfigError) as caught:
        dry_run(config)
    return str(caught.value)


def followed(config, said):
    """The config with the settings that a refusal names."""
    for setting in said.partition(": set ")[2].partition(" (then")[0].split():
        key, _, value = setting.partition("=")
        config = changed(config, {key: yaml.safe_load(value)})
    return config


def of(config):
    with assuming(config.machine):
        sizes = Sizes.of(config)
        return plan(config, sizes), sizes


def test_the_default_run_fits_and_leaves_nothing(dry, tmp_path, capsys):
    dry_run(dry)
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == "fits" and not list(tmp_path.iterdir())
    for words in ("826,752", "prl.inference.server --model tiny", "at most 131,072 tokens", "all, of 16.00", "524,288"):
        assert words in said
    assert max(map(len, said.splitlines())) <= 160 and "\x1b" not in said


def test_memory_is_that_of_all_processes(dry):
    found, sizes = of(dry)
    names = [process.name for process in found.processes]
    assert names == ["orchestrator", "inference", "trainer"] and found.capacities == {RAM: 16 * GIB}
    held = {process.name: process.held[RAM] for process in found.processes}
    parameters = sizes.policy.parameters
    assert held["inference"]["weights"] == held["trainer"]["weights"] == held["trainer"]["gradients"] == 4 * parameters
    assert held["inference"]["KV cache"] == GIB
    assert [held[name]["process"] for name in names] == [COMMAND, ENGINE, TRAINER]
    assert found.used()[RAM] == pytest.approx(sum(sum(parts.values()) for parts in held.values()))
    dry.trainer.num_processes = 3
    more, _ = of(dry)
    assert more.used()[RAM] - found.used()[RAM] == pytest.approx(2 * sum(held["trainer"].values()))
    dry.inference.urls = ["http://127.0.0.1:9"]
    without, _ = of(dry)
    assert more.used()[RAM] - without.used()[RAM] == pytest.approx(sum(held["inference"].values()))
    assert not without.caches


def test_a_kl_to_the_initial_model_takes_a_copy_of_the_weights(dry):
    assert not holds_reference(dry)
    before, sizes = of(dry)
    dry.algo.kl = {"coef": 0.1, "reference": "initial"}
    assert holds_reference(dry)
    after, _ = of(dry)
    assert after.used()[RAM] - before.used()[RAM] == 4 * sizes.policy.parameters
    dry.algo.kl = {"coef": 0.1, "reference": {"name": "a", "base_url": "http://127.0.0.1:9/v1"}}
    assert not holds_reference(dry)


def test_a_hosted_teacher_is_an_engine_of_its_own():
    from prl.compose import compose

    config = compose(["run.name=x", "algo=opd", "dry_run=true", "teacher.inference.kv_cache_gb=3"])
    found, sizes = of(config)
    [teacher] = [process for process in found.processes if process.name == "teacher"]
    assert teacher.held[RAM]["KV cache"] == 3 * GIB
    assert teacher.held[RAM]["weights"] == 4 * sizes.teacher.parameters
    assert [cache.process for cache in found.caches] == ["inference", "teacher"]


# --- what does not fit ------------------------------------------------------------------------------------------------


def test_the_setting_that_is_enough_is_named(dry):
    dry.machine = MachineConfig(ram_gb=6)
    dry.inference.kv_cache_gb = 5
    assert refused(dry).startswith("RAM would hold 6.7 GiB, and it has 6.0 GiB: set inference.kv_cache_gb=4 (then 5.7")
    dry.inference.kv_cache_gb = 4
    dry_run(dry)


def test_smaller_passes_are_named_before_recomputing(dry):
    dry.trainer.tokens_per_forward = 1 << 18
    assert "set trainer.tokens_per_forward=131072 (then 9" in refused(dry)
    dry.trainer.tokens_per_forward, dry.trainer.seq_len, dry.model.max_model_len = 131072, 131072, 131072
    dry.inference.args = {"hf-overrides": "{}"}  # such a length is beyond the model's config
    found, sizes = of(dry)
    assert found.used()[RAM] > 16 * GIB
    deep = changed(dry, {"trainer.gradient_checkpointing": True})
    assert plan(deep, sizes).used()[RAM] < found.used()[RAM] - 10 * GIB
    assert not dry.trainer.gradient_checkpointing, "the config stays as it was"


def test_two_settings_are_named_where_one_is_not_enough(dry):
    dry.machine = MachineConfig(ram_gb=2.9)
    dry.inference.kv_cache_gb, dry.trainer.tokens_per_forward = 2, 1 << 15
    said = refused(dry)
    assert "set inference.kv_cache_gb=1 trainer.tokens_per_forward=4096 (then 2." in said
    dry_run(followed(dry, said))
    with pytest.raises(ConfigError):
        dry_run(changed(followed(dry, said), {"trainer.tokens_per_forward": 8192}))
    with pytest.raises(ConfigError):
        dry_run(changed(followed(dry, said), {"inference.kv_cache_gb": 2}))


def test_an_engine_on_a_gpu_gives_way_but_keeps_room_for_a_sequence(large, bare):
    large.machine = MachineConfig(gpus=1, gpu_memory_gb=24.0, ram_gb=128.0, cores=16)
    large.model.path = str(bare("qwen3", **SIZES_06B))
    found, _ = of(large)
    trainer = next(each for each in found.processes if each.name == "trainer")
    assert sum(trainer.held["GPU 0"].values()) > 24 * GIB
    said = refused(large)
    assert "set inference.gpu_memory_utilization=0.1 trainer.tokens_per_forward=2" not in said, (
        "not without recomputing"
    )
    following = followed(large, said)
    assert following.inference.gpu_memory_utilization < 0.5 and following.trainer.gradient_checkpointing
    dry_run(following)


def test_where_no_setting_is_enough_that_is_said(dry):
    dry.machine = MachineConfig(ram_gb=1.5)
    said = refused(dry)
    assert "no setting is enough (with trainer.tokens_per_forward=512 trainer.gradient_checkpointing=true" in said
    assert said.endswith("choose a smaller model, or a machine with more memory")


def test_a_cache_without_room_for_one_sequence(large):
    large.machine = MachineConfig(gpus=0, ram_gb=10_000, cores=64)
    found, sizes = of(large)
    assert found.caches[0].bytes_per_token == kv_bytes_per_token(sizes.policy, "float32") == 64 * 2 * 8 * 128 * 4
    needed = 4096 * found.caches[0].bytes_per_token
    assert needed == 2 * GIB and found.caches[0].tokens < 4096
    said = refused(large)
    assert said.startswith("the KV cache of inference has room for 2,048 tokens, less than one sequence of 4,096: set ")
    assert "inference.kv_cache_gb=3" in said or "inference.kv_cache_gb=2" in said


# --- a machine that is not this one -----------------------------------------------------------------------------------


def test_a_32b_on_8_gpus_shows_what_sharding_leaves_of_it(large, capsys):
    large.trainer.num_processes = large.inference.tensor_parallel_size = 8
    assert refused(large).startswith("GPU 0 would hold")
    said = capsys.readouterr().out
    assert "32,762,123,264" in said and "fits" not in said
    rows = [line.split() for line in said.partition("share one copy")[2].splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["1", "2", "4", "8"]
    for row in rows:
        assert float(row[1]) == float(row[2]) == pytest.approx(32.762e9 * 4 / int(row[0]) / GIB, abs=0.01)
        assert float(row[3]) == pytest.approx(2 * float(row[1]), abs=0.02), "both means of AdamW's"
    recomputed = float(rows[-1][-1])
    assert recomputed < 80 < float(rows[-2][-1]), "8 ranks hold one copy with recomputed activations, 4 do not"


def test_gpus_hold_their_ranks_and_the_engines_share(large):
    large.trainer.num_processes, large.inference.tensor_parallel_size = 2, 4
    large.inference.gpu_memory_utilization = 0.4
    found, sizes = of(large)
    names = {device: [each.name for each in found.processes if device in each.held] for device in found.used()}
    assert names["GPU 0"] == names["GPU 1"] == ["inference", "trainer rank"] and names["GPU 3"] == ["inference"]
    engine = next(each for each in found.processes if each.name == "inference")
    assert sum(engine.held["GPU 3"].values()) == pytest.approx(0.4 * 80 * GIB)
    assert engine.held["GPU 3"]["weights"] == sizes.policy.parameters * 2 / 4
    assert found.caches[0].tokens * found.caches[0].bytes_per_token / 4 == pytest.approx(
        engine.held["GPU 3"]["KV cache"], rel=0.01
    )
    loading = [each.held[RAM].get("loading") for each in found.processes if each.name == "trainer rank"]
    assert loading == [4 * sizes.policy.parameters] * 2
    assert [each.held[RAM].get("loading", 0) for each in ranks(large, sizes, 2)] == [0, 0], "no GPU here"
    with assuming(large.machine):
        shared = ranks(large, sizes, 2)
    assert [each.held[RAM].get("loading", 0) for each in shared] == [4 * sizes.policy.parameters, 0]
    assert shared[0].held["GPU 0"]["weights"] == 2 * sizes.policy.parameters


def test_an_engine_that_does_not_fit_is_to_span_more_gpus(large, bare):
    large.inference.tensor_parallel_size, large.trainer.device = 1, "cpu"
    large.machine = copy.copy(large.machine)
    large.machine.ram_gb = 3000.0
    assert "set inference.tensor_parallel_size=2" in refused(large)


@pytest.mark.parametrize(
    ("key", "value"), [("trainer.num_processes", 9), ("inference.tensor_parallel_size", 16)], ids=["ranks", "engine"]
)
def test_gpus_that_are_not_there(large, key, value):
    assert refused(changed(large, {key: value})).startswith(f"{key}: ")


def test_a_gpu_without_a_size(large):
    large.machine = MachineConfig(gpus=2)
    assert refused(large) == "machine.gpus=2: give their memory, machine.gpu_memory_gb=<GiB of one>"


def test_cores_are_those_of_the_machine(dry):
    dry.inference.threads = 8
    assert refused(dry).startswith("inference.threads=8: this command may use 2 cores")
    dry.machine = MachineConfig(cores=8)
    dry_run(dry)


# --- commands ---------------------------------------------------------------------------------------------------------


def test_the_machine_is_of_dry_runs_alone(dry):
    from prl.config.validate import validate

    dry.dry_run, dry.machine = False, MachineConfig(gpus=1)
    with pytest.raises(ConfigError, match="add dry_run=true"):
        validate(dry)


def test_the_command(run_command, tmp_path, bare):
    folder = bare("llama")
    model = ["model=hf", f"model.path={folder}", "model.max_model_len=512", "run.dir=run"]
    done = run_command(tmp_path, "prl.train", *model, "dry_run=true")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\nfits\n") and "prl.inference.server --model bare" in done.stdout
    done = run_command(tmp_path, "prl.train", *model, "dry_run=true", "machine.ram_gb=1")
    assert done.returncode == 2 and done.stderr.startswith("error: RAM would hold")
    done = run_command(tmp_path, "prl.train", *model)
    assert done.returncode == 2 and "has no weights" in done.stderr, "a run needs what a dry run does not"
    done = run_command(tmp_path, "prl.train", "-m", "seed=0,1", "dry_run=true", "run.name=s")
    assert done.returncode == 2 and "dry_run=true is about one run" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} <= {"bare", "outputs"} and not (tmp_path / "run").exists()
