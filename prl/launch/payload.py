"""What the trainer's process reads as its config."""

from typing import Any

from prl.config.instantiate import plain
from prl.config.schema import ModelConfig, TrainConfig
from prl.config.validate import resolve_device


def trainer_payload(config: TrainConfig, model: ModelConfig, *, initial_reference: bool) -> dict[str, Any]:
    """The config of the trainer's process, ready for JSON.

    Args:
        config: the run's.
        model: the policy, resolved for this machine.
        initial_reference: whether samples ask for the logprobs of the model that the run began with.
    """
    losses = {"": config.loss} | {name: env.loss for name, env in config.envs.items() if env.loss is not None}
    return {
        "model": plain(model),
        "losses": plain(losses),
        "trainer": plain(config.trainer) | {"device": resolve_device(config.trainer.device)},
        "transport": plain(config.transport),
        "seed": config.seed,
        "max_steps": config.max_steps,
        "initial_reference": initial_reference,
    }
