"""A dry run: what it says of a config, what it refuses and the setting that it names, on this and on other machines."""

import pytest
import yaml
from small_models import QWEN3_32B

from prl.compose import compose
from prl.config import hardware, machine
from prl.config.hardware import GIB, MachineConfig, assuming
from prl.config.instantiate import plain
from prl.dry_run.advice import changed
from prl.dry_run.memory import kv_bytes_per_token
from prl.dry_run.plan import COMMAND, ENGINE, RAM, TRAINER, Sizes, holds_reference, or_loading, plan
from prl.dry_run.shape import optimiser_bytes
from prl.errors import ConfigError
from prl.train import main as dry_run

SIZES_06B = QWEN3_32B | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
ON_GPUS = ("machine.gpus=8", "machine.gpu_memory_gb=80")
GPUS = {"gpus": 8, "gpu_memory_gb": 80.0, "ram_gb": 2000.0, "cores": 64}


@pytest.fixture(scope="module")
def states():
    """What optimisers keep, by the parameters and the settings: a step says it, and most tests have the same."""
    return {}


@pytest.fixture(autouse=True)
def stepped_once(states, monkeypatch):
    def once(model, node):
        trained = [(name, each.shape, each.dtype) for name, each in model.named_parameters() if each.requires_grad]
        key = repr((trained, plain(node)))
        if key not in states:
            states[key] = optimiser_bytes(model, node)
        return states[key]

    monkeypatch.setattr("prl.dry_run.plan.optimiser_bytes", once)


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """This machine has 16 GiB, two cores and no GPU."""
    monkeypatch.setattr(machine, "memory_bytes", lambda: _assumed("ram_gb", 16) * GIB)
    monkeypatch.setattr(machine, "cores", lambda: int(_assumed("cores", 2)))
    monkeypatch.setattr(hardware, "listed", lambda: ())


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
    dry.trainer.shard_size = 1
    more, _ = of(dry)
    each = next(process.held[RAM] for process in more.processes if process.name == "trainer rank")
    assert each["weights"] == 4 * parameters and each["gathered"] > 0
    assert more.used()[RAM] - found.used()[RAM] == pytest.approx(3 * sum(each.values()) - sum(held["trainer"].values()))
    dry.trainer.shard_size = None
    shared, _ = of(dry)
    states = 4 * parameters * 2 + sizes.optimiser
    assert more.used()[RAM] - shared.used()[RAM] == pytest.approx(2 * states), "one copy, not three"
    dry.inference.servers = 2
    twice, _ = of(dry)
    assert twice.used()[RAM] - shared.used()[RAM] == pytest.approx(sum(held["inference"].values()))
    dry.inference.servers, dry.trainer.shard_size = 1, 1
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


def test_of_adapters_alone_there_are_gradients_and_a_state(dry, capsys):
    _, full = of(dry)
    dry.model.lora.rank = 4
    found, sizes = of(dry)
    adapters = 4 * 4 * (2 * (128 + 128) + 2 * (128 + 64) + 3 * (128 + 384))
    assert sizes.policy.adapters == adapters and sizes.policy.parameters == full.policy.parameters
    held = next(process.held[RAM] for process in found.processes if process.name == "trainer")
    assert held["weights"] == 4 * (full.policy.parameters + adapters)
    assert held["gradients"] == 4 * adapters and held["optimiser"] == sizes.optimiser < 0.12 * full.optimiser
    dry_run(dry)
    assert f"adapters of rank 4   {adapters:>10,}" in capsys.readouterr().out
    dry.model.lora.target_modules = ["q_porj"]
    with pytest.raises(ConfigError, match="'q_porj' is not the name of linear layers"):
        dry_run(dry)


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
    assert refused(dry).startswith("RAM would hold 6.5 GiB, and it has 6.0 GiB: set inference.kv_cache_gb=4 (then 5.5")
    dry.inference.kv_cache_gb = 4
    dry_run(dry)


def test_smaller_passes_are_named_before_recomputing(dry):
    dry.trainer.tokens_per_forward = 1 << 18
    assert "set trainer.tokens_per_forward=131072 (then 9" in refused(dry)
    dry.trainer.tokens_per_forward, dry.trainer.seq_len, dry.model.max_model_len = 131072, 131072, 131072
    dry.inference.args = {"hf-overrides": "{}"}  # such a length is beyond the model's config
    found, sizes = of(dry)
    assert found.used()[RAM] > 16 * GIB
    deep = changed(dry, {"trainer.gradient_checkpointing": "full"})
    assert plan(deep, sizes).used()[RAM] < found.used()[RAM] - 10 * GIB
    assert dry.trainer.gradient_checkpointing == "none", "the config stays as it was"


def test_two_settings_are_named_where_one_is_not_enough(dry):
    dry.machine = MachineConfig(ram_gb=2.68)
    dry.inference.kv_cache_gb, dry.trainer.tokens_per_forward = 2, 1 << 15
    said = refused(dry)
    assert "set inference.kv_cache_gb=1 trainer.tokens_per_forward=4096 (then 2." in said
    dry_run(followed(dry, said))
    with pytest.raises(ConfigError):
        dry_run(changed(followed(dry, said), {"trainer.tokens_per_forward": 8192}))
    with pytest.raises(ConfigError):
        dry_run(changed(followed(dry, said), {"inference.kv_cache_gb": 2}))


def test_an_engine_on_a_gpu_gives_way_but_keeps_room_for_a_sequence(large, bare):
    large.machine = MachineConfig(gpus=1, gpu_memory_gb=18.0, ram_gb=128.0, cores=16)
    large.model.path = str(bare("qwen3", **SIZES_06B))
    found, _ = of(large)
    trainer = next(each for each in found.processes if each.name == "trainer")
    assert sum(trainer.held["GPU 0"].values()) > 18 * GIB
    said = refused(large)
    assert "set inference.gpu_memory_utilization=0.1 trainer.tokens_per_forward=2" not in said, (
        "not without recomputing"
    )
    following = followed(large, said)
    assert following.inference.gpu_memory_utilization < 0.5 and following.trainer.gradient_checkpointing != "none"
    dry_run(following)


def test_fewer_engines_are_named_where_they_fit(dry):
    dry.machine, dry.inference.servers = MachineConfig(ram_gb=4.0), 4
    said = refused(dry)
    assert "set inference.servers=" in said
    following = followed(dry, said)
    assert 1 <= following.inference.servers < 4
    dry_run(following)


def test_where_no_setting_is_enough_that_is_said(dry):
    dry.machine = MachineConfig(ram_gb=1.5)
    said = refused(dry)
    assert (
        "none of the settings tried is enough (with trainer.tokens_per_forward=512 trainer.gradient_checkpointing=full"
        in said
    )
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


def test_a_32b_on_8_gpus_is_told_what_fits(large, capsys):
    large.machine = MachineConfig(**GPUS | {"ram_gb": 1000.0})
    said = refused(large)
    setting = "gpu_memory_utilization=0.85 trainer.gradient_checkpointing=selective trainer.cpu_offload=true"
    assert f"less than one sequence of 4,096: set inference.{setting} (then" in said
    page = capsys.readouterr().out
    assert "32,762,123,264" in page and "fits" not in page
    rows = [line.split() for line in page.partition("share one copy")[2].splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["1", "2", "4", "8"]
    for row in rows:
        assert float(row[1]) == float(row[2]) == pytest.approx(32.762e9 * 4 / int(row[0]) / GIB, abs=0.01)
        assert float(row[3]) == pytest.approx(2 * float(row[1]), abs=0.02), "both means of AdamW's"
    recomputed = float(rows[-1][-1])
    assert recomputed < 80 < float(rows[-2][-1]), "8 ranks hold one copy with recomputed activations, 4 do not"
    dry_run(following := followed(large, said))
    with pytest.raises(ConfigError):  # the next milder one
        dry_run(changed(following, {"trainer.gradient_checkpointing": "none"}))
    found, sizes = of(following)
    trainer = next(each for each in found.processes if each.name == "trainer")
    states = 4 * sizes.policy.parameters * 2 + sizes.optimiser
    assert trainer.held[RAM].keys() == {"weights", "gradients", "optimiser", "process"}
    assert sum(trainer.held[RAM].values()) == states + TRAINER
    assert not {"weights", "gradients", "optimiser"} & trainer.held["GPU 1"].keys()


def test_idle_gpus_are_for_more_ranks(large, bare):
    large.model.path = str(bare("qwen3", **QWEN3_32B | {"num_hidden_layers": 20}))
    said = refused(large)
    following = followed(large, said)
    assert following.trainer.num_processes > 1 and not following.trainer.cpu_offload
    dry_run(following)
    fewer = changed(following, {"trainer.num_processes": following.trainer.num_processes - 1})
    with pytest.raises(ConfigError):
        dry_run(fewer)


def test_each_server_and_rank_has_gpus_of_its_own(large):
    large.trainer.num_processes, large.inference.servers, large.inference.tensor_parallel_size = 4, 2, 2
    large.trainer.shard_size = 2
    found, sizes = of(large)
    names = {device: [each.name for each in found.processes if device in each.held] for device in found.used()}
    assert [names[f"GPU {place}"] for place in range(8)] == [["inference"]] * 4 + [["trainer rank"]] * 4
    engine = next(each for each in found.processes if each.name == "inference")
    assert sum(engine.held["GPU 1"].values()) == pytest.approx(0.5 * 80 * GIB)
    assert engine.held["GPU 1"]["weights"] == sizes.policy.parameters * 2 / 2
    assert found.caches[0].tokens * found.caches[0].bytes_per_token / 2 == pytest.approx(
        engine.held["GPU 1"]["KV cache"], rel=0.01
    )
    trainers = [each for each in found.processes if each.name == "trainer rank"]
    assert [each.held[RAM].get("loading", 0) for each in trainers] == [4 * sizes.policy.parameters, 0, 0, 0]
    assert trainers[3].held["GPU 7"]["weights"] == 2 * sizes.policy.parameters
    alone = MachineConfig(gpus=1, gpu_memory_gb=80.0, ram_gb=1000.0)
    large.machine, large.trainer.num_processes, large.trainer.shard_size = alone, 1, None
    large.inference.servers = large.inference.tensor_parallel_size = 1
    found, _ = of(large)
    assert [each.name for each in found.processes if "GPU 0" in each.held] == ["inference", "trainer"], "shared"


def test_the_first_rank_loads_the_model_before_it_has_anything_else():
    step = {"weights": 10.0, "gradients": 10.0, "optimiser": 20.0, "activations": 5.0}
    assert or_loading(step, 40) == step
    assert or_loading(step, 80) == {"loading": 80.0}
    assert or_loading(step | {"reference": 10.0}, 50) == {"weights": 10.0, "loading": 50.0}
    assert or_loading({}, 0) == {}


def test_an_engine_that_does_not_fit_is_to_span_more_gpus(large, bare):
    large.inference.tensor_parallel_size, large.trainer.device = 1, "cpu"
    large.machine = MachineConfig(**GPUS | {"gpu_memory_gb": 40.0})
    assert "set inference.tensor_parallel_size=4 (then" in refused(large)


@pytest.mark.parametrize(
    ("key", "value", "said", "total"),
    [
        ("trainer.num_processes", 9, "trainer.num_processes=9", 10),
        ("inference.servers", 8, "inference.servers=8 of tensor_parallel_size=1 and trainer.num_processes=1", 9),
    ],
    ids=["ranks", "engines"],
)
def test_gpus_that_are_not_there(large, key, value, said, total):
    assert f"{said} take {total} GPUs, each its own, and this machine has 8" in refused(changed(large, {key: value}))


def test_a_gpu_without_a_size(large):
    large.machine = MachineConfig(gpus=2)
    assert refused(large) == "of 2 GPUs the memory is not known here: give it, machine.gpu_memory_gb=<GiB of one>"


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


def test_a_run_needs_weights_which_a_dry_run_does_not(dry, bare):
    from prl.config.validate import validate

    dry.model.path = str(bare("llama"))
    validate(dry)
    dry.dry_run = False
    with pytest.raises(ConfigError, match="has no weights"):
        validate(dry)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("renderer.name=nope",), "renderer.name"),
        (("trainer.optim._target_=torch.optim.LBFGS",), "trainer.optim._target_=torch.optim.LBFGS: LBFGS doesn't"),
        (("inference.tensor_parallel_size=2",), "inference.tensor_parallel_size=2 is for GPUs"),
    ],
)  # fmt: skip
def test_what_a_run_refuses_a_dry_run_does(overrides, said):
    assert said in refused(compose(["run.name=x", "dry_run=true", *overrides]))


def test_a_model_without_layers(dry, bare):
    dry.model.path = str(bare("qwen3", num_hidden_layers=0))
    assert "it has no layers (num_hidden_layers=0)" in refused(dry)


def test_the_command(run_command, tmp_path, bare):
    folder = bare("llama", head_dim=64)
    model = ["model=hf", f"model.path={folder}", "model.max_model_len=512", "run.dir=run"]
    done = run_command(tmp_path, "prl.train", *model, "dry_run=true", "machine.ram_gb=1")
    assert done.returncode == 2 and done.stderr.startswith("error: RAM would hold")
    assert "prl.inference.server --model bare" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"bare"}


@pytest.mark.parametrize(
    ("varied", "fits", "said"),
    [
        (["seed=0,1", "run.dir=s"], 2, ""),
        (["orchestrator.batch_size=64,33"], 1, "error: job orchestrator.batch_size=33: orchestrator.batch_size=33"),
        (["model=tiny,nope"], 1, "error: job model=nope: there is no model=nope: choose "),
        (["seed=0,1", "dry_run=true,false"], 0, "error: dry_run is for all jobs of a sweep or for none"),
    ],
)
def test_a_dry_run_of_a_sweep_is_one_of_each_job_and_leaves_nothing(run_command, tmp_path, varied, fits, said):
    done = run_command(tmp_path, "prl.train", "-m", "dry_run=true", *varied)
    assert done.returncode == (2 if said else 0) and done.stderr.startswith(said) and done.stderr.count("\n") <= 1
    assert done.stdout.count("\nfits\n") == fits and not list(tmp_path.iterdir())
