"""The `sampling` nodes: the run's, an env's, the evaluation's, and an algorithm's source model."""

from dataclasses import dataclass, field, fields, make_dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Gt, Le, Lt

from prl.config.instantiate import plain
from prl.config.model_reference import POLICY, as_reference


@dataclass(kw_only=True)
class SamplingConfig:
    """How replies are sampled: the knobs of `prl.inference.sampler.Sampler`."""

    temperature: Annotated[float, Ge(0)] = 1.0
    """Logits are divided by it, in the engine and in the trainer. At least 0.01 for training; 0 = greedy."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Sample from the most likely tokens whose probabilities add up to this. 1 = off. Not for training."""
    top_k: Annotated[int, Ge(0)] = 0
    """Sample from this many of the most likely tokens. 0 = off. Not for training."""
    min_p: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Sample from tokens of at least this share of the most likely one's probability. 0 = off. Not for training."""
    max_tokens: Annotated[int, Ge(1)] | None = None
    """Longest completion of one turn, tokens; null = what `model.max_model_len` leaves."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a completion. The tokens that complete one stay in it, as they were sampled."""
    seed: Annotated[int, Ge(0)] | None = None
    """Seeds every request together with the request's name; null = the run's seed."""
    presence_penalty: Annotated[float, Ge(-2), Le(2)] = 0.0
    """Subtracted from the logits of tokens that the completion already contains. 0 = off. Not for training."""
    frequency_penalty: Annotated[float, Ge(-2), Le(2)] = 0.0
    """Subtracted from a token's logit for each time the completion contains it. 0 = off. Not for training."""
    repetition_penalty: Annotated[float, Gt(0)] = 1.0
    """Divides the logits of tokens that prompt or completion contain. 1 = off. Not for training."""


if TYPE_CHECKING:  # the code reads these nodes as mappings, so that a type checker has no need of their fields

    class EnvSamplingConfig:
        """Sampling settings of one env."""

    class EvalSamplingConfig:
        """Sampling settings of evaluation."""

else:
    EnvSamplingConfig = make_dataclass(
        "EnvSamplingConfig",
        [
            ("_target_", str, field(default="${sampling._target_}")),
            *((knob.name, knob.type, field(default=f"${{sampling.{knob.name}}}")) for knob in fields(SamplingConfig)),
        ],
        namespace={
            "__module__": __name__,
            "__doc__": "Sampling settings of one env, `envs.<name>.sampling`; each is the run's unless it is set here.",
        },
    )

    EvalSamplingConfig = make_dataclass(
        "EvalSamplingConfig",
        [(knob.name, knob.type | None, field(default=None)) for knob in fields(SamplingConfig)],
        namespace={
            "__module__": __name__,
            "__doc__": "Sampling settings of evaluation, `orchestrator.eval.sampling`; null = as the env trains.",
        },
    )


@dataclass
class SourceConfig:
    """The model that generates an algorithm's rollouts."""

    source: Any = POLICY
    """`policy`, the model being trained, or a frozen model: {name, base_url}."""

    def __post_init__(self) -> None:
        self.source = as_reference(self.source)


def env_sampling(run: Any, env: Any) -> dict[str, Any]:
    """The sampling node of an env, to be built.

    Args:
        run: The run's `sampling` node. It may name a class of the user's own with knobs that `env` does not have.
        env: The env's node, an `EnvSamplingConfig`; what it says replaces what the run says, knob by knob.
    """
    node: dict[str, Any] = plain(run) | plain(env)
    return node
