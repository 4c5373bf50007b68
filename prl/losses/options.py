"""Options of a loss: a frozen dataclass beside its function, and the mark that ties the two together.

No torch here, nor in `rl.py`: a config is checked, and `conf/loss/` written, without loading it.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from prl.base.errors import ConfigError
from prl.config.build import located, maker, read, settings_of

if TYPE_CHECKING:
    from prl.losses.interface import LossFunction, LossInputs, LossOutputs

AggMode = Literal["token_mean", "sequence_mean", "rollout_mean", "constant"]
CUTS = ("icepop", "sequence")
"""Corrections that leave tokens out."""
READ_BY = {"correction_cap": ("tis",), "correction_low": CUTS, "correction_high": CUTS}
"""Options that only some corrections read."""


@dataclass(frozen=True)
class NoOptions:
    """Options of a loss that has none."""


@dataclass(frozen=True)
class PolicyOptions:
    """Options of every rl loss of prl. `prl.losses.policy.PolicyTokens` has the formulas."""

    has_ratio: ClassVar[bool] = True
    """The loss itself has a ratio to the sampler, which a correction must not count twice."""
    entropy_coef: Annotated[float, Ge(0), Le(1e6)] = 0.0
    """Entropy bonus: subtract this times the policy's mean entropy at rl tokens (nats) from the loss. 0 = off."""
    entropy_target: Annotated[float, Gt(0), Le(1e6)] | None = None
    """Target of the mean entropy at the rl tokens of this loss (`entropy_rl/<env, all>`), nats. After a step below it
    `entropy_coef` grows by `entropy_step`; after a step above it `entropy_coef` shrinks and is not applied. null =
    `entropy_coef` is constant."""
    entropy_step: Annotated[float, Gt(0), Le(1e6)] = 0.005
    """Change of `entropy_coef` after a step, only for `entropy_target`."""
    agg_mode: AggMode = "token_mean"
    """Mean over tokens, over sequences (samples), over rollouts, or the sum divided by `constant_length` times the
    number of sequences, which does not depend on lengths."""
    constant_length: Annotated[int, Ge(1)] | None = None
    """Tokens, only for `agg_mode=constant`, e.g. the longest completion."""
    proximal: bool = False
    """Take ratios to the trainer's logprobs before the first update on a batch, not to the sampler's (decoupled PPO,
    arXiv 2505.24298); for several updates on a batch. `correction` weighs the ratio between the two."""
    correction: Literal["none", "tis", "icepop", "sequence"] = "none"
    """Correction of the mismatch of trainer and sampler, by their ratio rho: truncated importance sampling (tis)
    multiplies advantages by rho, at most `correction_cap`; icepop masks tokens, and sequence masks sequences (by their
    geometric mean), outside `correction_low` and `correction_high`."""
    correction_cap: Annotated[float, Gt(0), Le(1e30)] = 2.0
    """Largest rho, for `tis`."""
    correction_low: Annotated[float, Ge(0), Le(1)] = 0.5
    """Smallest rho that trains, for `icepop` and `sequence`."""
    correction_high: Annotated[float, Ge(1), Le(1e30)] = 5.0
    """Largest rho that trains, for `icepop` and `sequence`."""

    @property
    def may_weigh(self) -> bool:
        """Return whether a correction may multiply advantages by rho: no other ratio to the sampler is in the loss."""
        return self.proximal or not self.has_ratio

    def check(self, where: str, *, several_updates: bool) -> None:
        """Raise ConfigError for options that contradict each other, or the number of updates on a batch.

        Args:
            where: the config key of the loss.
            several_updates: whether a batch has more than one.
        """
        if self.proximal and not several_updates:
            raise ConfigError(
                f"{where}.proximal=true: with one update on a batch the ratio to the logprobs before it is always 1; "
                "set trainer.updates_per_batch or trainer.epochs above 1, or leave it out"
            )
        for name, corrections in READ_BY.items():
            if self.correction not in corrections and getattr(self, name) != getattr(PolicyOptions, name):
                raise ConfigError(f"{where}.{name} is given, but only correction={' or '.join(corrections)} reads it")
        if self.correction == "tis" and not self.may_weigh:
            raise ConfigError(
                f"{where}.correction=tis: the loss has a ratio to the sampler itself, which would count twice; choose "
                f"loss=reinforce, {where}.proximal=true, or {where}.correction=icepop, which only leaves tokens out"
            )
        if self.agg_mode == "constant" and self.constant_length is None:
            raise ConfigError(f"{where}.agg_mode=constant needs {where}.constant_length=<tokens>")
        if self.agg_mode not in ("constant", None) and self.constant_length is not None:
            raise ConfigError(
                f"{where}.constant_length={self.constant_length}: {where}.agg_mode={self.agg_mode} reads none; set "
                "agg_mode=constant"
            )


@dataclass(frozen=True)
class OwnOptions(PolicyOptions):
    """Options of a function of the user's own, as far as it has those of prl's losses.

    Nobody knows which ratios it computes, or which mean it takes: it is refused nothing on these grounds.
    """

    has_ratio = False
    agg_mode: AggMode | None = None  # type: ignore[assignment]


def tokenwise(options: type[Any]) -> Callable[[Callable[[Any, Any], Any]], Callable[..., "LossOutputs"]]:
    """Make a loss function of a formula over a packed row, with a frozen dataclass of its options.

    Called by hand, as `fn(inputs, **options)`, it takes one sequence like any other loss. `compute_loss` finds the
    formula, as `fn.formula`, and runs it once over the row instead of once per sequence.

    Args:
        options: the class of the options, `fn.Config`. One that extends the options of a loss of prl, a frozen
            dataclass again, is treated as that loss's: its bounds, its ratio, its entropy target.

    Returns:
        A decorator of `formula(inputs: LossInputs, options) -> TokenTerms`.
    """

    def made(formula: Callable[[Any, Any], Any]) -> Callable[..., "LossOutputs"]:
        @functools.wraps(formula)
        def loss(inputs: "LossInputs", **given: Any) -> "LossOutputs":
            from prl.losses.compute import summed

            return summed(formula(inputs, options(**given)), inputs)

        # The signature is the one of a call by hand, not that of the formula, which `wraps` has put there.
        vars(loss).update(Config=options, formula=formula, __signature__=inspect.signature(loss, follow_wrapped=False))
        return loss

    return made


def loss_of(node: Any, where: str) -> "functools.partial[LossOutputs]":
    """The loss function that a config node names, with all of its options.

    Options that a function of the user's own takes as `**options` are those of a loss of prl which it extends: they
    have that one's types and bounds.

    Raises ConfigError for a node that names no function, and for an option that it does not take.
    """
    target = located(node, where)
    if hasattr(target, "Config"):
        return functools.partial(target, **vars(read(target.Config, settings_of(node), where)))
    own = maker(node, Callable, where)
    named = inspect.signature(own.func).parameters
    passed_on = {name: value for name, value in own.keywords.items() if name not in named}
    # The function does not say which loss it passes its options on to: the first that has all of them is taken for it.
    for kind in PolicyOptions.__subclasses__():
        if passed_on.keys() <= {field.name for field in fields(kind)}:
            read(kind, passed_on, where)
            break
    return own


def as_partial(loss: "LossFunction") -> "functools.partial[LossOutputs]":
    """Return a loss function as a partial, which holds its options; a plain function becomes one without any."""
    return loss if isinstance(loss, functools.partial) else functools.partial(loss)


def options_of(loss: "LossFunction") -> PolicyOptions:
    """The options that an rl loss is called with; of a function of the user's own those that it shares with prl's."""
    # An rl loss may also be one of the other components', `ce_loss` say, whose options have none of these.
    bound = as_partial(loss)
    kind: type[Any] = getattr(bound.func, "Config", NoOptions)
    if issubclass(kind, PolicyOptions):
        return kind(**bound.keywords)
    shared = {field.name for field in fields(OwnOptions)}
    return OwnOptions(**{name: value for name, value in bound.keywords.items() if name in shared})
