"""The launcher for a Slurm job: what it refuses, what it gives processes, and what ends them."""

import os
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from patience import patient

from prl.compose import compose
from prl.config.gpus import Place
from prl.config.hardware import MachineConfig, assumed
from prl.config.instantiate import build
from prl.config.machine import cores, memory_bytes
from prl.config.schema import InferenceConfig, ModelConfig
from prl.config.validate import resolve_device, validate
from prl.errors import ConfigError, PrlError
from prl.launch import nodes, slurm, specs
from prl.launch.launcher import EngineSpec, Launcher, TrainerSpec
from prl.launch.local import LOOPBACK
from prl.launch.slurm import DEAF, SlurmLauncher, Step
from prl.trainer.config import MEETING_VARIABLE

TEACHER = ("algo=opd", "teacher=local")


@pytest.fixture
def job(monkeypatch):
    """`job(names)`: this process is in a job of these nodes, on the second of them."""

    def inside(*names):
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURMD_NODENAME", names[-1] if len(names) < 2 else names[1])
        monkeypatch.setattr(
            slurm.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="\n".join(names), check=True)
        )
        monkeypatch.setenv("SLURM_JOB_NODELIST", ",".join(names))

    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    return inside


def engine(tmp_path, process="inference", device="cuda", **config):
    return EngineSpec(
        process=process,
        served_name="policy",
        model=ModelConfig(path="m"),
        config=InferenceConfig(**config),
        device=device,
        seed=0,
        token="secret",
        log=tmp_path / "a.log",
        frozen=process == "teacher",
    )


def trainer(tmp_path, *places):
    run, model = tmp_path / "run", ModelConfig(path="m")
    return TrainerSpec(run_dir=run, model=model, payload={}, num_processes=len(places), places=places)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("launcher.nodes=0", "launcher.nodes must be at least 1, got 0"),
        ("launcher.gpus_per_node=-1", "launcher.gpus_per_node must be at least 0, got -1"),
        ("launcher.cpus_per_task=0", "launcher.cpus_per_task must be at least 1, got 0"),
        ("launcher.partition='a b'", "launcher.partition='a b' must be one word"),
        ("launcher.account=''", "launcher.account='' must be one word"),
        ("launcher.time='1\"'", "launcher.time='1\"' must be one word"),
        ('launcher.interface="a\nb"', r"launcher.interface='a\\nb' must be one word"),
    ],
)
def test_knobs_that_are_refused(overrides, says):
    config = compose(["run.name=x", "launcher=slurm", overrides])
    with pytest.raises(ConfigError, match=says):
        build(config.launcher, Launcher, "launcher")


def test_outside_a_job_a_config_is_checked_for_the_machine_that_the_job_will_get(job):
    here = cores()
    config = compose(["run.name=x", "launcher=slurm", "inference.device=cuda", "trainer.device=cuda"])
    with build(config.launcher, Launcher, "launcher"), pytest.raises(ConfigError, match="launcher.gpus_per_node=0"):
        validate(config)
    config = compose(
        ["run.name=x", "launcher=slurm", "launcher.gpus_per_node=2", "launcher.cpus_per_task=77", "trainer.device=cuda"]
    )
    with build(config.launcher, Launcher, "launcher"):
        validate(config)
        assert (cores(), memory_bytes(), resolve_device("auto")) == (77, None, "cuda")
    assert assumed() == MachineConfig() and cores() == here
    job("here")
    with build(config.launcher, Launcher, "launcher"):
        assert assumed() == MachineConfig(gpus=2) and cores() == here, "the GPUs are the job's"
    assert assumed() == MachineConfig()


def test_a_shell_of_salloc_on_the_login_node_is_outside(job, monkeypatch):
    assert SlurmLauncher().hands_over
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert SlurmLauncher().hands_over
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    assert not SlurmLauncher().hands_over


def test_outside_a_job_nothing_is_started(job, tmp_path):
    launcher = SlurmLauncher()
    launcher.import_ahead([engine(tmp_path, device="cpu")], trainer(tmp_path, Place()))
    assert not launcher.standby and launcher.scratch is None
    with pytest.raises(ConfigError, match="launcher=slurm: prl train alone submits a job"):
        launcher.start_engine(engine(tmp_path, device="cpu"))
    with pytest.raises(ConfigError, match="launcher=slurm: prl train alone submits a job"):
        launcher.start_trainer(trainer(tmp_path, Place()))


def test_the_nodes_of_a_job_begin_with_its_own(job, monkeypatch):
    job("n1", "n2", "n3")
    assert slurm.allocated() == ["n2", "n1", "n3"]
    monkeypatch.delenv("SLURM_JOB_NODELIST")
    with pytest.raises(PrlError, match="launcher=slurm: which nodes this job has cannot be found out"):
        slurm.allocated()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["trainer.num_processes=1"],
            "launcher.nodes=2: node 2 would have nothing to do. Raise trainer.num_processes, now 1",
        ),
        (
            ["trainer.num_processes=2"],
            r"launcher.nodes=2: the trainer's ranks are on 2 nodes.*launcher.interface=<name>",
        ),
        (["trainer.num_processes=2", "launcher.interface=ib0"], None),
        (
            ["inference.servers=2"],
            r"inference.host=127.0.0.1: a server comes to node 2, .* write inference.host=0.0.0.0",
        ),
        (["inference.servers=2", "inference.host=0.0.0.0"], None),
        ([*TEACHER], "launcher.nodes=2: node 2 would have nothing to do"),
        ([*TEACHER, "teacher.inference.servers=2"], "teacher.inference.host=127.0.0.1: a server comes to node 2"),
        ([*TEACHER, "teacher.inference.servers=2", "teacher.inference.host=0.0.0.0"], None),
    ],
)
def test_what_does_not_suit_the_nodes_is_refused(job, overrides, says):
    config = compose(["run.name=x", "launcher=slurm", "launcher.nodes=2", *overrides])
    with build(config.launcher, Launcher, "launcher") as launcher:
        if says is None:
            return nodes.check_places(config, launcher)
        with pytest.raises(ConfigError, match=says):
            nodes.check_places(config, launcher)


def test_gpus_are_those_of_each_node(job):
    settings = ("launcher.nodes=2", "launcher.gpus_per_node=2", "trainer.num_processes=3", "launcher.interface=ib0")
    config = compose(["run.name=x", "launcher=slurm", *settings])
    with build(config.launcher, Launcher, "launcher") as launcher:
        nodes.check_places(config, launcher)
        assert specs.placement(config) == ([(0, (0,))], [(0, (1,)), (1, (0,)), (1, (1,))], [])
        config.trainer.num_processes = 4
        with pytest.raises(ConfigError, match="take 5 GPUs, .* launcher.nodes=2 with 2 each"):
            nodes.check_places(config, launcher)


def test_a_job_with_fewer_nodes_than_asked_for_is_refused(job, tmp_path):
    job("n1")
    with SlurmLauncher(nodes=2) as launcher, pytest.raises(ConfigError, match="launcher.nodes=2, and this job has 1"):
        launcher.start("other", ["sh"], env={}, log=tmp_path / "a.log", place=Place(1))


def test_what_ranks_have_in_their_environment(job, tmp_path):
    job("n1", "n2")
    with SlurmLauncher(interface="ib0") as launcher:
        ranks = launcher._ranks(trainer(tmp_path, Place(0), Place(1)))
    assert list(ranks) == ["trainer rank 0", "trainer rank 1"]
    assert {env["VLLM_HOST_IP"] for env in ranks.values()} == {"127.0.0.1"}
    [meeting] = {env[MEETING_VARIABLE] for env in ranks.values()}
    assert meeting.startswith(f"{(tmp_path / 'run').resolve()}/slurm/ranks-")
    job("n1")
    with SlurmLauncher(interface="ib0", gpus_per_node=2) as launcher:
        ranks = launcher._ranks(trainer(tmp_path, Place(0, (0,)), Place(0, (1,))))
    assert [env["LOCAL_RANK"] for env in ranks.values()] == ["0", "0"], "each sees one GPU"
    assert {str(tmp_path) in env[MEETING_VARIABLE] for env in ranks.values()} == {False}


@pytest.mark.parametrize(
    ("nodes", "interface", "seen"),
    [(["n1", "n2"], "ib0", "ib0 ib0"), (["n1", "n2"], None, "lo lo"), (["n1"], "ib0", "lo lo")],
)
def test_where_processes_listen_for_each_other(job, tmp_path, nodes, interface, seen):
    """Engines too, since weights may be sent to them; on loopback unless there are nodes and the user names another."""
    job(*nodes)
    script = ["sh", "-c", "echo $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME"]
    with SlurmLauncher(interface=interface, nodes=len(nodes)) as launcher:
        process = launcher.start("inference", script, env=dict(LOOPBACK), log=tmp_path / "log")
        while process.status is None:
            time.sleep(0.01)
    assert (tmp_path / "log").read_text().strip() == seen


def test_a_rank_outlives_slurms_sigterm_and_ends_at_once_with_the_launcher(job, tmp_path, pids, sleeper, gone):
    job("n1")
    with SlurmLauncher() as launcher:
        for name in ("trainer", "other"):
            launcher.start(name, ["sh", "-c", sleeper(name)], env={}, log=tmp_path / f"{name}.log")
        rank, other = pids.wait("trainer", "other")
        for pid in (rank, other):
            os.kill(pid, signal.SIGTERM)
        pids.wait_gone(other, timeout_s=5)
        assert not gone(rank)
        began = time.monotonic()
    assert time.monotonic() - began < patient(3)
    pids.wait_gone(rank, timeout_s=1)


def test_a_step_carries_no_secret_on_its_command_line():
    step = Step.__new__(Step)
    step.host, step.name, step.command, step.env = "n2", "trainer rank 1", [*DEAF, "python"], {"T": "secret"}
    words = step.arguments()
    assert words[0] == "srun" and "--nodelist=n2" in words and "--ntasks=1" in words and "--overlap" in words
    assert words[-6:] == ["prl.launch.node", *DEAF, "python"] and "secret" not in " ".join(words)
    step.returncode = 0


def test_an_engine_is_reached_at_its_node(job, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(SlurmLauncher, "elsewhere", lambda _, place, name, *rest: started.append((place.node, name)))
    job("n1", "n2")
    launcher = SlurmLauncher(nodes=2)
    launcher.hosts = slurm.allocated()
    url = launcher.start_engine(replace(engine(tmp_path, "inference 2", "cpu", host="0.0.0.0"), place=Place(1)))
    assert url.startswith("http://n1:") and started == [(1, "inference 2")]


@pytest.mark.parametrize(
    ("places", "address"),
    [
        ([Place(0)], "127.0.0.1"),
        ([Place(0, (0,)), Place(0, (1,))], "127.0.0.1"),
        ([Place(0), Place(1)], "10.0.0.5"),
        ([Place(1)], "10.0.0.5"),
    ],
)
def test_ranks_on_other_nodes_reach_the_orchestrator_on_the_interface_that_was_named(monkeypatch, places, address):
    monkeypatch.setattr(nodes, "address_of", lambda interface: {"ib0": "10.0.0.5"}[interface])
    assert SlurmLauncher(interface="ib0,eth0").reached_at(places) == address
