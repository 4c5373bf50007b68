"""The last steps of an algorithm: from the advantages and weights of its hooks to the streams of the samples."""

import math
from itertools import compress, islice

from prl.rollouts.components import COMPONENTS, STREAM_FILL
from prl.rollouts.messages import TrainingSample
from prl.rollouts.rollout import Rollout


def write_advantages(rollout: Rollout) -> None:
    """Cut the advantages of a rollout into those of its samples. Nothing where the algorithm has assigned none."""
    if rollout.advantages is None:
        return
    credit = iter(rollout.advantages)  # of all samples, end to end
    for sample in rollout.samples:
        sample.advantages = list(islice(credit, len(sample.token_ids)))


def default_weights(sample: TrainingSample, action_loss_type: str) -> None:
    """Write the weights of a sample that its algorithm has not written, by the rule of `Algorithm`'s docstring."""
    for component in COMPONENTS.values():
        weights = getattr(sample, component.stream)
        acts = component.name == action_loss_type
        if weights is None:
            # Where absence means the default, the stream stays absent: plain grpo ships none.
            if component.absent_weight != float(acts):
                setattr(sample, component.stream, [float(acts and trains) for trains in sample.mask])
        elif acts and len(weights) == len(sample.mask):  # another length is refused by its name, by `check_streams`
            # A hook that weighs observations alone adds them: it says nothing of the sampled tokens.
            sampled = list(compress(sample.mask, weights))
            if sampled and not any(sampled):
                _replace_weights(sample, component.stream, weights, 1.0)


def leave_out_sampled(sample: TrainingSample) -> None:
    """Take the sampled tokens out of every loss (`mask_truncated`); observations keep their weights."""
    for component in COMPONENTS.values():
        weights = getattr(sample, component.stream) or [component.absent_weight] * len(sample.mask)
        # A stream without weight on sampled tokens stays as it is, and an absent one stays absent.
        if any(compress(weights, sample.mask)):
            _replace_weights(sample, component.stream, weights, 0.0)


def leave_out_pictures(sample: TrainingSample) -> None:
    """Take the placeholder tokens of pictures out of every loss: nobody wrote them."""
    for component in COMPONENTS.values():
        weights = list(getattr(sample, component.stream) or ())
        if not weights:  # no placeholder has any: it is off the mask
            continue
        for picture in sample.pictures or ():
            weights[picture.start : picture.stop] = [0.0] * picture.length
        setattr(sample, component.stream, weights)


def _replace_weights(sample: TrainingSample, stream: str, weights: list[float], sampled: float) -> None:
    """Give the sampled tokens of a sample one weight; the others keep theirs."""
    pairs = zip(weights, sample.mask, strict=True)
    setattr(sample, stream, [sampled if trains else weight for weight, trains in pairs])


def check_finite(sample: TrainingSample) -> None:
    """Raise ValueError for a stream with NaN or an infinity in it, which would spoil the whole step."""
    for name in STREAM_FILL:
        if not all(map(math.isfinite, getattr(sample, name) or ())):
            raise ValueError(f"{name} of a sample holds a number that is not finite")


def check_source(sample: TrainingSample) -> None:
    """Raise ValueError for a frozen model's sample in a loss that reads the logprobs of the policy's sampler."""
    for component in COMPONENTS.values():
        if component.reads_sampler and sample.feeds(component):
            raise ValueError(
                f"a frozen model's rollout feeds the {component.name} loss, which needs the policy's own rollouts"
            )
