"""What keeps weights from passing between the processes of a run (`transport=broadcast`), before any is started."""

from prl.config.instantiate import class_of, plain
from prl.config.schema import TrainConfig
from prl.config.validate import resolve_device
from prl.errors import ConfigError
from prl.launch import specs
from prl.launch.launcher import Launcher
from prl.launch.nodes import NodesLauncher
from prl.wire.broadcast import BroadcastTransport
from prl.wire.transport import Transport

INSTEAD = "choose transport=files"


def check_broadcast(config: TrainConfig, launcher: Launcher) -> None:
    """Raise ConfigError where the transport sends weights, and this run cannot."""
    if not issubclass(class_of(config.transport, Transport, "transport"), BroadcastTransport):
        return
    orchestrator, where = config.orchestrator, f"transport._target_={plain(config.transport)['_target_']}"
    if orchestrator.strict_async_level and orchestrator.max_async_level:
        raise ConfigError(
            f"orchestrator.strict_async_level=true with max_async_level={orchestrator.max_async_level} needs weights "
            f"of earlier steps, and {where} has the trainer's newest alone: {INSTEAD}, or leave strict_async_level out"
        )
    if orchestrator.eval.keep_best:
        raise ConfigError(
            f"orchestrator.eval.keep_best=true keeps weights that were evaluated, and {where} leaves none on the disk: "
            f"{INSTEAD}, or leave keep_best out"
        )
    engine, trainer = resolve_device(config.inference.device), resolve_device(config.trainer.device)
    if engine != trainer:
        raise ConfigError(
            f"{where}: weights pass from CPU to CPU or from GPU to GPU, not from trainer.device={trainer} to "
            f"inference.device={engine}: {INSTEAD}"
        )
    if isinstance(launcher, NodesLauncher) and launcher.interface is None and are_apart(config, launcher):
        raise ConfigError(
            f"{where} with launcher.nodes={launcher.nodes}: weights pass between nodes without a token: name the "
            f"network interface that they may use, launcher.interface=<name> (ip -br address lists them), or {INSTEAD}"
        )


def are_apart(config: TrainConfig, launcher: NodesLauncher) -> bool:
    """Whether weights may pass between nodes: from the trainer's first rank to the engines. Of urls that is unknown."""
    found = specs.placement(config)
    nodes = {place.node for place in (found.ranks[0], *found.engines)}
    return launcher.nodes > 1 and (bool(config.inference.urls) or len(nodes) > 1)
