"""Learning rate over steps."""

import math

from prl.trainer.config import ScheduleConfig


def lr_factor(step: int, max_steps: int, config: ScheduleConfig) -> float:
    """Share of the peak learning rate in `step` (1-based): linear warm-up, plateau, then decay to `min_ratio`."""
    if step <= config.warmup_steps:
        return step / (config.warmup_steps + 1)
    decay_steps = round(max_steps * config.decay_fraction)
    into_decay = step - (max_steps - decay_steps)
    if config.decay == "constant" or into_decay <= 0 or decay_steps == 0:
        return 1.0
    progress = into_decay / decay_steps
    shape = 1 - progress if config.decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_ratio + (1 - config.min_ratio) * shape
