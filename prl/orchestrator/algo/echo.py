"""ECHO."""

import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prl.config.build import FunctionConfig, locate_function
from prl.config.errors import ConfigError
from prl.orchestrator.algo.grpo import GRPOAlgorithm, GRPOConfig

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
        if config.filter._target_ is not None:
            locate_function(config.filter._target_, f"{where}.filter")

    async def setup(self) -> None:
        target = self.config.filter._target_
        self.filter = None if target is None else locate_function(target, "filter")
        self._warned = False

    async def score_rollout(self, rollout: "Rollout") -> None:
        keep = self._keep_masks(rollout)
        trained: set[int] = set()  # a message on several branches trains on the first of them
        for branch, sample in zip(rollout.sample_branches, rollout.samples, strict=True):
            weights = self._weights(branch, trained)
            if keep is not None:
                weights = [w if kept else 0.0 for w, kept in zip(weights, keep[branch.index], strict=True)]
            if any(weights):
                sample.ce_weights = weights

    def _weights(self, branch: "Branch", trained: set[int]) -> list[float]:
        """The cross-entropy weight of each token of a branch."""
        weights: list[float] = []
        answered = False
        for node in branch.nodes:
            role = self.config.roles.get(node.message.role)
            if answered and not node.sampled and role is not None and id(node) not in trained:
                trained.add(id(node))
                weights += [role["alpha"] * is_body for is_body in self._body(node)]
            else:
                weights += [0.0] * len(node.token_ids)
            answered = answered or node.sampled
        return weights

    def _body(self, node: "MessageNode") -> list[bool]:
        """Which of a message's tokens are its body, as far as the renderer can tell them from the template's."""
        if node.is_content:
            return node.is_content
        if node.token_ids and not self._warned:
            self._warned = True
            log.warning("echo: this renderer does not tell a message's body from its template: whole messages are trained on")
        return [True] * len(node.token_ids)

    def _keep_masks(self, rollout: "Rollout") -> dict[int, list[bool]] | None:
        """What the user's filter keeps, by branch."""
        if self.filter is None:
            return None
        name, branches = self.config.filter._target_, [branch for branch in rollout.branches if branch.trainable]
        masks = list(self.filter(rollout, **self.config.filter.kwargs))
        if len(masks) != len(branches):
            raise ValueError(f"{name} must return one keep-mask per trainable branch: {len(branches)}, got {len(masks)}")
        for branch, mask in zip(branches, masks, strict=True):
            if len(mask) != (length := len(branch.token_ids)):
                raise ValueError(
                    f"{name}: the keep-mask of branch {branch.index} must span the branch's tokens: {length}, got {len(mask)}"
                )
        return {branch.index: mask for branch, mask in zip(branches, masks, strict=True)}
