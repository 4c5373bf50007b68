"""What a machine cannot hold is refused with numbers."""

import os

import pytest

from prl import serve
from prl.config import machine
from prl.config.schema import ServeConfig
from prl.config.validate import validate
from prl.errors import ConfigError

GIB = 1 << 30
MEMORY = machine.memory_bytes


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A machine of two cores and 8 GiB."""
    monkeypatch.setattr(machine, "cores", lambda: 2)
    monkeypatch.setattr(machine, "memory_bytes", lambda: 8 * GIB)
    monkeypatch.setattr("prl.config.validate.has_gpu", lambda: False)


def refused(config):
    with pytest.raises(ConfigError) as caught:
        validate(config)
    return str(caught.value)


def test_the_memory_of_this_machine_is_known():
    found = MEMORY()
    assert found is not None and 2**20 < found <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_cache_larger_than_the_memory(config):
    config.inference.kv_cache_gb = 8
    validate(config)
    config.inference.kv_cache_gb = 9
    assert refused(config) == "inference.kv_cache_gb=9: that takes 9 GiB, and this machine has 8.0 GiB of memory"
    config.inference.urls = ["http://127.0.0.1:9"]  # an engine that runs already has what it has
    validate(config)


def test_more_ranks_than_cores_are_allowed_up_to_a_point(config):
    config.trainer.num_processes = 16
    validate(config)
    config.trainer.num_processes = 17
    assert refused(config).startswith("trainer.num_processes=17: this machine has 2 cores")


def test_ranks_need_memory_for_their_weights(config, monkeypatch):
    config.trainer.num_processes = 3
    one = 8 * machine.parameters_of(config.model)
    assert 5e6 < one < 10e6, "weights and gradients of 0.8M parameters"
    monkeypatch.setattr(machine, "check_memory", lambda gib, what: seen.append((gib, what)))
    seen = []
    for size, copies in ((None, 1), (3, 1), (1, 3)):
        config.trainer.shard_size = size
        seen.clear()
        machine.check_ranks(config.trainer, config.model)
        assert seen[0][0] * GIB == pytest.approx(copies * one)
        assert seen[0][1].startswith(f"trainer.num_processes=3 with {copies} times the weights")


def test_settings_of_ranks_and_layers_that_do_not_go_together(config, monkeypatch):
    trainer = config.trainer
    trainer.num_processes, trainer.shard_size = 4, 2
    validate(config)
    trainer.shard_size = 3
    assert refused(config).startswith("trainer.shard_size=3 does not divide trainer.num_processes=4")
    trainer.shard_size, trainer.cpu_offload = 4, True
    assert refused(config).startswith("trainer.cpu_offload=true: ")
    machine.check_sharding(trainer, "cuda")
    trainer.cpu_offload, trainer.compile, trainer.gradient_checkpointing = False, True, "selective"
    assert refused(config).startswith("trainer.gradient_checkpointing=selective with trainer.compile=true")
    trainer.gradient_checkpointing = "full"
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert refused(config) == "trainer.compile=true needs a C++ compiler, and no-such-compiler is not installed"
    monkeypatch.setenv("CXX", "true")
    validate(config)


def test_a_row_that_no_memory_holds(config):
    most = 8 * GIB // (128 * 4 * 4 * 8)  # width, layers, bytes, vectors of each layer
    config.trainer.seq_len = most
    validate(config)
    config.trainer.seq_len = most + 1
    assert refused(config).startswith(f"trainer.seq_len={most + 1} in one row: that takes 8 GiB")
    config.trainer.gradient_checkpointing = "selective"
    assert refused(config).startswith("trainer.seq_len=")
    config.trainer.gradient_checkpointing = "full"
    validate(config)


def test_rollouts_under_way(config):
    config.orchestrator.batch_size, config.orchestrator.oversampling_factor = 8 * GIB // 4096, 1.0
    validate(config)
    config.orchestrator.oversampling_factor = 1.5
    assert "with oversampling_factor=1.5 keeps" in refused(config)


@pytest.mark.parametrize("key", ["orchestrator.group_size", "envs.math.group_size", "orchestrator.eval.k"])
def test_more_completions_of_a_prompt_than_an_engine_takes(config, key):
    *path, name = key.split(".")
    node = config
    for part in path:
        node = node[part] if isinstance(node, dict) else getattr(node, part)
    setattr(node, name, 16384)
    config.orchestrator.batch_size = 16384
    validate(config)
    setattr(node, name, 32768)
    config.orchestrator.batch_size = 32768
    assert refused(config).startswith(f"{key}=32768: an engine takes at most 16384")


def test_a_run_directory_that_cannot_be(config, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    for path, says in (
        (file, "is a file"),
        (file / "x", "cannot be made"),
        (tmp_path / ("x" * 300), "cannot be made: File name too long"),
        ("", "is no directory's path"),
        ("a\nb", "is no directory's path"),
    ):
        config.run.dir = str(path)
        assert refused(config).startswith("run.dir=") and says in refused(config)
    monkeypatch.setattr(machine.os, "access", lambda path, mode: path != tmp_path)  # this user may be root
    config.run.dir = str(tmp_path / "a" / "b")
    assert refused(config).endswith(f"cannot be written to: {tmp_path} is read-only for this user")


@pytest.mark.parametrize("below", ["", "x/y"])
@pytest.mark.parametrize("target", ["/nonexistent/disk", "disk"])
def test_a_run_directory_on_a_disk_that_is_not_mounted(config, tmp_path, target, below):
    link = tmp_path / "disk"
    link.symlink_to(target)  # the second one leads to itself
    config.run.dir = str(link / below)
    assert refused(config) == (
        f"run.dir='{config.run.dir}' cannot be made: {link} is a link to '{target}', which leads nowhere: mount that "
        "disk, or name another run.dir"
    )


def test_a_run_directory_where_none_can_be_made(config, tmp_path):
    config.run.dir = "/proc/foo/bar"
    assert refused(config) == (
        "run.dir='/proc/foo/bar' cannot be made: /proc takes no new directory (No such file or directory): name "
        "another run.dir"
    )
    config.run.dir = str(tmp_path / "x" / "y")
    validate(config)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", [" ", "a\nb", "a\x1b[2J", "x" * 201, "ü" * 101])
def test_a_run_name_that_no_directory_should_have(config, name):
    config.run.name = name
    assert refused(config).startswith("run.name=") and len(refused(config)) < 200


def test_a_port_is_for_one_server(config):
    config.inference.port = config.teacher.inference.port = 9000
    assert refused(config).startswith("inference.port and teacher.inference.port are both 9000")
    config.inference.port, config.inference.servers = 8998, 3
    assert refused(config).startswith("inference.port and teacher.inference.port: servers of both would have port 9000")
    config.inference.servers = 2
    validate(config)
    config.inference.port, config.inference.servers = 65535, 2
    assert refused(config).startswith("inference.port=65535: 2 servers take the ports from there on")


def test_so_many_servers_fit_this_machine_and_none_beside_those_that_run(config, monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: 2)
    monkeypatch.setattr(machine, "memory_bytes", lambda: 8 << 30)
    config.inference.device = "cpu"
    config.inference.servers, config.inference.kv_cache_gb = 8, 1
    validate(config)
    config.inference.servers = 17
    assert refused(config).startswith("inference.servers=17: this machine has 2 cores; more than 8 servers for each")
    config.inference.servers, config.inference.kv_cache_gb = 3, 3
    assert refused(config).startswith("inference.kv_cache_gb=3 for each of 3 servers: that takes 9 GiB, and this")
    config.inference.kv_cache_gb, config.inference.urls = 1, ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    assert refused(config).startswith("inference.servers=3 says how many are started, and inference.urls names 2")
    config.inference.servers, config.inference.threads = 1, 2
    assert refused(config).startswith("inference.threads=2: the engines of inference.urls have run since before")


def test_a_model_is_served_on_its_own_by_one_server(config):
    node = ServeConfig(name="x", policy=True, model=config.model, inference=config.inference, log="log")
    config.inference.servers = 2
    with pytest.raises(ConfigError, match=r"^inference\.servers=2: this command serves one; start it once for each"):
        serve.main(node)
