"""Threads that each process of a run computes with: from the cores, who shares them, and the model's size."""

from prl.config.hardware import parameters_of
from prl.config.schema import ModelConfig

PARAMETERS_PER_THREAD = 2_500_000
"""With 0.8 million parameters a second thread saved a fifth of an update's time for a quarter more processor time, with
7 million a third (experiments/benchmarks/step.md). Engine and trainer at once on two cores made `tiny` slower so."""
BESIDE_GPU = 8
"""Threads of a process that computes on a GPU, at most: it reads, converts and checks whole models on the CPU."""


def share(given: int | None, model: ModelConfig, device: str, processes: int, cores: int) -> int:
    """Threads of one of the processes that compute on a machine's cores at the same time.

    Args:
        given: The number that the config asks for; None = as follows from the rest.
        model: The model that it computes with. One whose size is not known here, as of the hub, counts as a large one.
        device: `cpu` or `cuda`. With a GPU it has at most `BESIDE_GPU`.
        processes: The processes that share the cores, itself among them.
        cores: The cores of the machine.
    """
    if given is not None:
        return given
    fair = max(1, cores // max(1, processes))
    if device != "cpu":
        fair = min(fair, BESIDE_GPU)
    parameters = parameters_of(model)
    return fair if parameters is None else max(1, min(fair, parameters // PARAMETERS_PER_THREAD))
