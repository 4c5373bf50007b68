"""What `transport=broadcast` is refused for."""

import pytest

from prl.compose import compose
from prl.config.hardware import MachineConfig, assuming
from prl.errors import ConfigError
from prl.launch.broadcasts import check_broadcast
from prl.launch.components import build_components

ENVS = ("run.name=x", "env=math", "envs.math.args.num_tasks=8", "transport=broadcast")
ON_CPU = ("inference.device=cpu", "trainer.device=cpu")
ON_GPU = ("inference.device=cuda", "trainer.device=cuda")
NODES = ("launcher=slurm", "launcher.nodes=2")


def check(*overrides):
    config = compose([*ENVS, *overrides])
    check_broadcast(config, build_components(config).launcher)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            (*ON_CPU, "orchestrator.strict_async_level=true", "orchestrator.max_async_level=2"),
            r"^orchestrator\.strict_async_level=true with max_async_level=2 needs weights of earlier.*transport=files",
        ),
        ((*ON_CPU, "orchestrator.eval.keep_best=true"), r"^orchestrator\.eval\.keep_best=true .*transport=files"),
        (("inference.device=cuda", "trainer.device=cpu"), r"from trainer\.device=cpu to inference\.device=cuda"),
        ((*ON_CPU, *NODES, "inference.servers=2"), r"with launcher\.nodes=2: .* launcher\.interface=<name>"),
        ((*ON_CPU, *NODES, "inference.urls=[http://10.0.0.5:1]"), r"with launcher\.nodes=2: .* launcher\.interface="),
    ],
)
def test_what_cannot_be_sent_is_refused_with_a_way_out(overrides, message):
    with assuming(MachineConfig(gpus=1)), pytest.raises(ConfigError, match=message):
        check(*overrides)
    with assuming(MachineConfig(gpus=1)):
        check(*overrides, "transport=files")


@pytest.mark.parametrize(
    ("overrides", "gpus"),
    [
        (ON_CPU, 0),
        ((*ON_CPU, "orchestrator.strict_async_level=true", "orchestrator.max_async_level=0"), 0),
        (ON_GPU, 1),
        (ON_GPU, 2),
        ((*ON_GPU, "inference.servers=2", "inference.tensor_parallel_size=2", "trainer.num_processes=4"), 8),
        ((*ON_CPU, *NODES, "inference.servers=2", "launcher.interface=ib0"), 0),
        ((*ON_CPU, *NODES, "algo=opd", "teacher=local", "teacher.inference.servers=2"), 0),  # the second node has that
    ],
)
def test_what_can_be_sent_is_not(overrides, gpus):
    with assuming(MachineConfig(gpus=gpus)):
        check(*overrides)
