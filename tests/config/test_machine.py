"""What a machine cannot hold is refused with numbers."""

import os
import platform

import pytest
from prepared_run import validated

from prl import serve
from prl.base.errors import ConfigError
from prl.config import hardware
from prl.config.schema import ServeConfig
from prl.runs.run_dir import refuse_other_files

GIB = 1 << 30
MEMORY = hardware.memory_bytes


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A machine of two cores and 8 GiB."""
    monkeypatch.setattr(hardware, "cores", lambda: 2)
    monkeypatch.setattr(hardware, "memory_bytes", lambda: 8 * GIB)
    monkeypatch.setattr(hardware, "listed", lambda: ())


def refused(config):
    with pytest.raises(ConfigError) as caught:
        validated(config)
    return str(caught.value)


def test_the_memory_of_this_machine_is_known():
    found = MEMORY()
    assert found is not None and 2**20 < found <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    "flags, name",
    [
        ("fpu sse4_2 avx avx2", "AVX2"),
        ("avx avx2 avx512f avx512_bf16", "AVX-512"),
        ("avx2 avx512f amx_bf16 amx_tile", "AVX-512 with AMX"),
        ("sse2 avx", platform.machine()),
    ],
)
def test_a_measurement_names_the_instruction_set(flags, name, tmp_path, monkeypatch):
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: {flags}\n")
    monkeypatch.setattr(hardware, "CPU_INFO", path)
    assert hardware.instruction_set() == name
    assert f", 2 cores, {name}, load " in hardware.machine_now()


def test_a_cache_larger_than_the_memory(config):
    config.engine.kv_cache_gb = 8
    validated(config)
    config.engine.kv_cache_gb = 9
    assert refused(config) == "engine.kv_cache_gb=9: that takes 9 GiB, and this machine has 8.0 GiB of memory"
    config.engine.urls = ["http://127.0.0.1:9"]  # an engine that runs already has what it has
    validated(config)


def test_a_run_directory_that_cannot_be(config, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    for path in ("", "a\nb"):
        config.run.dir = path
        assert refused(config).startswith("run.dir=")
    for path in (file, file / "x"):
        with pytest.raises(ConfigError, match="^run.dir="):
            refuse_other_files(path)
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # this user may be root
    with pytest.raises(ConfigError, match=f"^run.dir=.*{tmp_path} is no directory"):
        refuse_other_files(tmp_path / "a" / "b")


@pytest.mark.parametrize("name", [" ", "a\nb", "a\x1b[2J"])
def test_a_run_name_that_no_directory_should_have(config, name):
    config.run.name = name
    assert refused(config).startswith("run.name=") and len(refused(config)) < 200


def test_a_model_is_served_on_its_own_by_one_server(config):
    node = ServeConfig(name="x", policy=True, model=config.model, engine=config.engine, log="log")
    config.engine.servers = 2
    with pytest.raises(ConfigError, match=r"^engine\.servers=2: this command serves one: start it once for each"):
        serve.main(node)


def test_ranks_need_memory_for_their_weights(config, monkeypatch):
    config.trainer.num_processes, config.trainer.shard_size = 4, 1
    monkeypatch.setattr("prl.config.validate.parameters_of", lambda model: GIB)
    assert refused(config).startswith("trainer.num_processes=4 ")
    config.trainer.shard_size = 4
    validated(config)
