"""GPUs that Slurm jobs of a sweep ask for."""

import os

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig

from prl.compose import CONF
from prl.config import hardware
from prl.sweep.gpus import ask_for_gpus


@pytest.fixture
def asked(monkeypatch):
    """`asked(varied, *overrides)`: the `gpus_per_node` of a sweep, with the packages for GPUs."""
    monkeypatch.setattr(hardware, "has_gpu_packages", lambda: True)
    monkeypatch.setattr(hardware, "listed", lambda: ())  # none on the machine that submits

    def ask(varied, *overrides, sweep="submitit_slurm"):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            given = [f"sweep={sweep}", "run.name=s", *overrides]
            config = compose("train", given, return_hydra_config=True)
            task = [*varied, *(each for each in given if not each.startswith("hydra"))]
            config.hydra.overrides.task = task
            before = HydraConfig.instance().cfg
            ask_for_gpus(config)
            assert HydraConfig.instance().cfg is before
        return config.hydra.launcher.gpus_per_node

    return ask


@pytest.mark.parametrize(
    ("overrides", "gpus"),
    [
        ((), 1),  # shared by engine and trainer
        (("trainer.num_processes=2",), 3),
        (("inference.servers=2", "inference.tensor_parallel_size=2", "trainer.num_processes=3"), 7),
        (("trainer.device=cpu", "inference.tensor_parallel_size=4"), 4),
        (("algo=opd",), 1),
        (("algo=opd", "trainer.num_processes=2"), 4),
        (("trainer.device=cpu", "inference.device=cpu"), None),
    ],
)
def test_as_many_as_the_runs_processes_take(asked, overrides, gpus):
    assert asked(["seed=0,1"], *overrides) == gpus


@pytest.mark.parametrize(
    ("varied", "gpus"),
    [
        (["trainer.num_processes=1,4,2"], 5),
        (["algo=grpo,opd", "inference.servers=1,2"], 4),
        (["algo=grpo,no_such_algo", "inference.servers=1,2"], 3),
        (["trainer.optim.lr=interval(1e-5,1e-3)"], 1),
    ],
)
def test_as_many_as_the_job_that_takes_most(asked, varied, gpus):
    assert asked(varied) == gpus


@pytest.mark.parametrize(
    ("override", "gpus"),
    [
        ("hydra.launcher.gpus_per_node=8", 8),
        ("hydra.launcher.gpus_per_node=0", 0),
        ("hydra.launcher.gpus_per_task=2", None),
        ("hydra.launcher.gres=gpu:a100:1", None),
        ("+hydra.launcher.additional_parameters.gpus=1", None),
    ],
)
def test_what_the_command_asks_for_stays(asked, override, gpus):
    assert asked(["seed=0,1"], override) == gpus


def test_none_on_a_cpu_install_or_on_this_machine(asked, monkeypatch):
    assert asked(["seed=0,1"], sweep="submitit_local") is None
    monkeypatch.setattr(hardware, "has_gpu_packages", lambda: False)
    assert asked(["seed=0,1"]) is None


SBATCH = """#!/bin/sh
for script; do :; done
cat "$script" > "$(dirname "$0")/asked"
echo "no such partition" >&2
exit 1
"""


def test_sbatch_is_asked_for_them(run_command, tmp_path, monkeypatch):
    """By a command that finds a distribution of the GPU engine's name. Slurm itself takes no job here."""
    programs, packages = tmp_path / "bin", tmp_path / "packages" / "vllm-0.0.dist-info"
    programs.mkdir()
    packages.mkdir(parents=True)
    (packages / "METADATA").write_text("Name: vllm\n")
    for name in ("sbatch", "srun"):
        (programs / name).write_text(SBATCH)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, (str(packages.parent), os.environ.get("PYTHONPATH")))))
    done = run_command(tmp_path, "prl.train", "-m", "sweep=submitit_slurm", "trainer.num_processes=2", "seed=0,1")
    assert "#SBATCH --gpus-per-node=3\n" in (programs / "asked").read_text(), done
    assert "each Slurm job asks for hydra.launcher.gpus_per_node=3\n" in done.stderr
