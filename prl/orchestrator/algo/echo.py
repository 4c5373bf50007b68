"""ECHO."""

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prl.config.instantiate import FunctionConfig, locate_call
from prl.errors import ConfigError
from prl.orchestrator.algo.grpo import GRPOAlgorithm, GRPOConfig
from prl.rollouts.messages import keyed

if TYPE_CHECKING:
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import Branch

    from prl.rollouts.rollout import Rollout

log = logging.getLogger(__name__)

ROLES = ("system", "user", "assistant", "tool")


@dataclass
class EchoConfig(GRPOConfig):
    """GRPO on what the model says, cross-entropy on what the env answers."""

    _target_: str = "prl.orchestrator.algo.echo.EchoAlgorithm"
    roles: dict[str, dict[str, float]] = field(default_factory=dict)
    """Whose messages train, and how much, as +algo.roles.user.alpha=0.05; empty = the tool's at 0.1. To name any role is to
    name all."""
    filter: FunctionConfig = field(default_factory=FunctionConfig)
    """`fn(rollout, **kwargs)`: one keep-mask for each trainable branch, as long as its token ids. It can only narrow."""

    def __post_init__(self) -> None:
        self.roles = self.roles or {"tool": {"alpha": 0.1}}


class EchoAlgorithm(GRPOAlgorithm):
    """grpo's credit on sampled tokens; on the env's own tokens, cross-entropy weighted by their message's role.

    Selected are the bodies of messages that the model did not sample, after its first turn. They stay outside the `rl` mask
    and its count. Source: ECHO, whose lambda is `alpha` here.
    """

    @classmethod
    def check(cls, config: Any, where: str) -> None:
        super().check(config, where)
        for role, settings in config.roles.items():
            if role not in ROLES:
                raise ConfigError(f"{where}.roles.{role}: no message has that role; choose from {', '.join(ROLES)}")
            if set(settings) != {"alpha"} or not 0 < settings["alpha"] < math.inf:
                raise ConfigError(f"{where}.roles.{role} must be {{alpha: <a number above 0>}}, got {dict(settings)}")
        if config.filter._target_ is None and config.filter.kwargs:
            raise ConfigError(
                f"{where}.filter.kwargs are given, but no filter: name it with {where}.filter._target_=my.function"
            )
        if config.filter._target_ is not None:
            locate_call(config.filter, f"{where}.filter")

    async def setup(self) -> None:
        node = self.config.filter
        self.filter = None if node._target_ is None else locate_call(node, "filter")
        self._warned = False

    async def score_rollout(self, rollout: "Rollout") -> None:
        keep = self._keep_masks(rollout)
        done = {key for branch in rollout.branches for key, node in keyed(branch) if node.sampled}
        for branch, sample in zip(rollout.sample_branches, rollout.samples, strict=True):
            weights = self._weights(branch, keep.get(branch.index), done)
            if any(weights):
                sample.ce_weights = weights

    def _weights(self, branch: "Branch", keep: list[bool] | None, done: set) -> list[float]:
        """The cross-entropy weight of each token of a branch.

        `done` names the messages that the model sampled and those trained on already: what stands on several branches, as
        itself or rendered again, trains on the first of them. The chosen are added to it.
        """
        weights: list[float] = []
        sampled = frozenset(done)
        answered = False
        for key, node in keyed(branch):
            role, length = self.config.roles.get(node.message.role), len(node.token_ids)
            own = [0.0] * length
            if answered and role is not None and key not in done:
                kept = self._body(node) if keep is None else map(all, zip(self._body(node), keep[len(weights) :]))
                own = [role["alpha"] * bool(chosen) for chosen in kept]
            if any(own):
                done.add(key)
            weights += own
            answered = answered or node.sampled or (key in sampled and node.message.role == "assistant")
        return weights

    def _body(self, node: "MessageNode") -> list[bool]:
        """Which of a message's tokens are its body, as far as the renderer can tell them from the template's."""
        if node.is_content:
            return node.is_content
        if node.token_ids and not self._warned:
            self._warned = True
            log.warning(
                "echo: this renderer does not tell a message's body from its template: whole messages are trained on"
            )
        return [True] * len(node.token_ids)

    def _keep_masks(self, rollout: "Rollout") -> dict[int, list[bool]]:
        """What the user's filter keeps, by branch; empty without one."""
        if self.filter is None:
            return {}
        name, branches = self.config.filter._target_, [branch for branch in rollout.branches if branch.trainable]
        masks = self.filter(rollout)
        masks = list(masks) if isinstance(masks, Iterable) else masks
        if (got := size(masks)) != len(branches):
            raise ValueError(f"{name} must return one keep-mask per trainable branch: {len(branches)}, got {got}")
        for branch, mask in zip(branches, masks, strict=True):
            if (got := size(mask)) != (length := len(branch.token_ids)):
                raise ValueError(
                    f"{name}: the keep-mask of branch {branch.index} must span the branch's tokens: {length}, got {got}"
                )
        return {branch.index: mask for branch, mask in zip(branches, masks, strict=True)}


def size(masks: Any) -> int | str:
    """How many there are, or what else it is."""
    return len(masks) if hasattr(masks, "__len__") else f"a {type(masks).__name__}"
