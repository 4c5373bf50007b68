"""What the trainer's process reads as its config."""

from typing import Any

from prl.config.instantiate import class_of, own_arguments, own_knobs, plain, schema_defaults
from prl.config.schema import ModelConfig, TrainConfig
from prl.config.signature import parameters
from prl.config.targets import locate
from prl.config.validate import resolve_device
from prl.trainer.schedule import Schedule


def trainer_payload(config: TrainConfig, model: ModelConfig, *, initial_reference: bool) -> dict[str, Any]:
    """The config of the trainer's process, ready for JSON.

    Args:
        config: the run's.
        model: the policy, resolved for this machine.
        initial_reference: whether samples ask for the logprobs of the model that the run began with.
    """
    schedule = config.trainer.schedule
    taken = parameters(class_of(schedule, Schedule, "trainer.schedule"))
    named = {"_target_": plain(schedule)["_target_"]} | own_knobs(schedule, taken)
    losses = {"": ("loss", config.loss)}
    losses |= {name: (f"envs.{name}.loss", env.loss) for name, env in config.envs.items() if env.loss is not None}
    return {
        "model": plain(model),
        "losses": {name: own_loss(where, node) for name, (where, node) in losses.items()},
        "trainer": plain(config.trainer) | {"device": resolve_device(config.trainer.device), "schedule": named},
        "transport": plain(config.transport),
        "seed": config.seed,
        "max_steps": config.max_steps,
        "initial_reference": initial_reference,
    }


def own_loss(where: str, node: Any) -> dict[str, Any]:
    """The node of a loss as plain data, without knobs of the one that it has replaced."""
    own: dict[str, Any] = plain(node)
    if own["_target_"] != schema_defaults(node).get("_target_"):
        own = {"_target_": own["_target_"]} | own_arguments(node, locate(own["_target_"], where))
    return own
