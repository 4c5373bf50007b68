"""Threads that each process of a run computes with: from the cores, who shares them, and the model's size."""

from prl.config.evaluation import EvaluationConfig
from prl.config.hardware import cores, parameters_of
from prl.config.schema import ModelConfig, TrainConfig
from prl.config.validate import hosts_teacher

PARAMETERS_PER_THREAD = 2_500_000
"""With 0.8 million parameters a second thread saved a fifth of an update's time for a quarter more processor time, with
7 million a third (experiments/benchmarks/step.md). Engine and trainer at once on two cores made `tiny` slower so."""


BESIDE_GPU = 8
"""Threads of a process that computes on a GPU, at most: it reads, converts and checks whole models on the CPU."""


def share(given: int | None, model: ModelConfig, device: str, processes: int) -> int:
    """Threads of one of the processes that compute on this machine's cores at the same time.

    Args:
        given: What the config says; None = as follows from the rest.
        model: What it computes with. One whose size is not known here, as of the hub, counts as a large one.
        device: `cpu` or `cuda`. With a GPU it has at most `BESIDE_GPU`.
        processes: How many share the cores, itself among them.
    """
    if given is not None:
        return given
    fair = max(1, cores() // max(1, processes))
    if device != "cpu":
        fair = min(fair, BESIDE_GPU)
    parameters = parameters_of(model)
    return fair if parameters is None else max(1, min(fair, parameters // PARAMETERS_PER_THREAD))


def of_engine(config: TrainConfig | EvaluationConfig, model: ModelConfig) -> int:
    """Threads of each of the policy's engines; in an evaluation they have the cores to themselves."""
    processes = sharing(config) if isinstance(config, TrainConfig) else config.engine.servers
    return share(config.engine.threads, model, config.engine.device_type, processes)


def of_trainer(config: TrainConfig) -> int:
    """Threads of each rank of the trainer.

    Of a model with work for several threads an update takes longer than generation. So ranks share the cores with each
    other alone, and engines have what is left while both are at work: `smollm2` trained in 17.5 instead of 20.6 s a
    step on two cores.
    """
    device = "cpu" if config.trainer.cpu_offload else config.trainer.device_type  # where the optimiser steps
    return share(config.trainer.threads, config.model, device, config.trainer.num_processes)


def sharing(config: TrainConfig) -> int:
    """Processes that compute on this machine's cores while it samples.

    With max_async_level=0 sampling and training take turns. A server of `engine.urls` counts: most are on the same
    machine.
    """
    servers = [config.engine.device_type] * (len(config.engine.urls) or max(1, config.engine.servers))
    if hosts_teacher(config):
        servers += [config.teacher.engine.device_type] * max(1, config.teacher.engine.servers)
    sampling = servers.count("cpu")
    if config.orchestrator.max_async_level == 0 or config.trainer.device_type != "cpu":
        return sampling
    ranks: int = config.trainer.num_processes
    return sampling + ranks
