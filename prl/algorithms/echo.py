"""ECHO: a policy gradient on sampled tokens, and cross-entropy on the messages of the env."""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile
from typing import TYPE_CHECKING, Any

from prl.algorithms.grpo import GRPOAlgorithm
from prl.base.errors import ConfigError
from prl.config.build import name_of
from prl.rollouts.components import COMPONENTS
from prl.rollouts.rollout import MessageKey, Rollout, keyed_nodes

if TYPE_CHECKING:
    from verifiers.v1.trace import Branch
    from verifiers.v1.types import Message

log = logging.getLogger(__name__)

ROLES = ("system", "user", "assistant", "tool")

SILENT_STEPS = 3
"""Steps in a row without an observation that trains, after which a warning says so."""


@dataclass(kw_only=True)
class EchoAlgorithm(GRPOAlgorithm):
    """GRPO on sampled tokens; on tokens that the env provides, cross-entropy weighted by the role of their message.

    Trained are the bodies of messages that the model did not sample and that follow its first turn. They stay outside
    the `rl` mask and its count. Source: ECHO, whose lambda is `alpha` here.
    """

    roles: dict[str, dict[str, Any]] | None = None
    """Weight `alpha` of the messages of each role, as +algo.roles.user.alpha=0.05. Setting any role replaces the whole
    table; null = {tool: {alpha: 0.1}}. Role `tool` may have `tool_names`, a list: of other tools no message trains."""
    filter: Callable[[Any], Iterable[Sequence[bool]]] | None = None
    """`filter(rollout)` returns a keep-mask for each trainable branch, as long as its token ids; further keys are its
    keyword arguments. null = keep all observations."""

    _warned: bool = field(default=False, init=False)
    _silent: int = field(default=0, init=False)
    """Steps in a row without an observation that trains; -1 once the warning is out."""

    @property
    def chosen(self) -> dict[str, dict[str, Any]]:
        """The roles that train, each with its weight `alpha`, and perhaps `tool_names`."""
        return self.roles or {"tool": {"alpha": 0.1}}

    def alpha(self, message: "Message", called: dict[str, str]) -> float:
        """Return the weight of a message; `called` are the names of the tools that were called, by the call's id."""
        settings = self.chosen.get(message.role, {"alpha": 0.0})
        names = settings.get("tool_names")
        return settings["alpha"] if names is None or tool_of(message, called) in names else 0.0

    def check(self, where: str) -> None:
        super().check(where)
        if self.roles is not None and not self.roles:
            raise ConfigError(
                f"{where}.roles is empty: name at least one role, e.g. +{where}.roles.tool.alpha=0.1, or choose "
                "algo=grpo"
            )
        for role, settings in (self.roles or {}).items():
            if role not in ROLES:
                raise ConfigError(f"{where}.roles.{role}: no message has that role; choose from {', '.join(ROLES)}")
            alpha, names = settings.get("alpha"), settings.get("tool_names", [""])
            if (
                set(settings) - {"alpha", "tool_names"}
                or not isinstance(alpha, int | float)
                or not 0 < alpha < math.inf
            ):
                raise ConfigError(f"{where}.roles.{role} must be {{alpha: <a number above 0>}}, got {dict(settings)}")
            if "tool_names" in settings and role != "tool":
                raise ConfigError(f"{where}.roles.{role}.tool_names: only messages of the role `tool` are of tools")
            if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
                raise ConfigError(
                    f"{where}.roles.tool.tool_names must be a list of tools, e.g. [search], got {names!r}"
                )
        if self.filter is not None and not callable(self.filter):
            raise ConfigError(f"{where}.filter={self.filter!r}: name a function, +{where}.filter._target_=my.function")

    async def score_rollout(self, rollout: Rollout) -> None:
        keep = self._keep_masks(rollout)
        # A message that the model sampled on one branch is no observation on another, where it was rendered again.
        done = {key for branch in rollout.branches for key, node in keyed_nodes(branch) if node.sampled}
        for branch, sample in zip(rollout.sample_branches, rollout.samples, strict=True):
            weights = self._weights(branch, keep.get(branch.index), done)
            if any(weights):
                sample.ce_weights = weights

    def observe_batch(self, rollouts: list[Rollout]) -> None:
        """Warn once if the env's messages never train, with the roles that there are."""
        if self._silent < 0 or not rollouts:
            return
        trains = any(sample.feeds(COMPONENTS["ce"]) for rollout in rollouts for sample in rollout.samples)
        self._silent = 0 if trains else self._silent + 1
        if self._silent == SILENT_STEPS:
            self._silent = -1
            roles = [labelled(role, settings.get("tool_names", ())) for role, settings in self.chosen.items()]
            chosen = ", ".join(roles) + ("" if self.filter is None else ", narrowed by algo.filter")
            there = ", ".join(sorted(set().union(*map(observed_roles, rollouts)))) or "none"
            log.warning(
                f"env {rollouts[0].env_name}: echo has trained no observation in {SILENT_STEPS} steps: algo.roles has "
                f"{chosen}; after the model's first turn the env has messages of the roles: {there}"
            )

    def _weights(self, branch: "Branch", keep: Sequence[bool] | None, done: set[MessageKey]) -> list[float]:
        """The cross-entropy weight of each token of a branch, `[tokens]`.

        Args:
            branch: the branch of the trace, whose messages lie end to end.
            keep: the user's keep-mask, `[tokens]`; None keeps everything.
            done: keys of messages that the model sampled or that train on an earlier branch. A message on several
                branches trains on the first of them, also where it was rendered again. Those chosen here are added.
        """
        weights: list[float] = []
        called: dict[str, str] = {}
        sampled = frozenset(done)
        answered = False
        for key, node in keyed_nodes(branch):
            own = [0.0] * len(node.token_ids)
            called |= calls_of(node.message)
            alpha = self.alpha(node.message, called)
            if answered and alpha and key not in done:
                if not node.is_content and node.token_ids and not self._warned:
                    self._warned = True
                    log.warning(
                        "echo: this renderer does not tell a message's body from its template: whole messages are "
                        "trained on"
                    )
                body = node.is_content or [True] * len(node.token_ids)
                # The weights so far are of the messages before this one: its part of the mask begins behind them.
                kept = body if keep is None else [all(pair) for pair in zip(body, keep[len(weights) :], strict=False)]
                own = [alpha if chosen else 0.0 for chosen in kept]
            if any(own):
                done.add(key)
            weights += own
            # A reply that was rendered again is a turn of the model too, though its tokens are not sampled on this
            # branch.
            answered = answered or node.sampled or (key in sampled and node.message.role == "assistant")
        return weights

    def _keep_masks(self, rollout: Rollout) -> dict[int, Sequence[bool]]:
        """Return what the user's filter keeps, by branch index; empty without a filter."""
        if self.filter is None:
            return {}
        name = name_of(self.filter)
        branches = [branch for branch in rollout.branches if branch.trainable]
        masks: Any = self.filter(rollout)
        masks = list(masks) if isinstance(masks, Iterable) else masks
        if size(masks) != len(branches):
            raise ValueError(
                f"{name} must return one keep-mask per trainable branch: {len(branches)}, got {size(masks)}"
            )
        for branch, mask in zip(branches, masks, strict=True):
            if size(mask) != len(branch.token_ids):
                raise ValueError(
                    f"{name}: the keep-mask of branch {branch.index} must span the branch's tokens: "
                    f"{len(branch.token_ids)}, got {size(mask)}"
                )
        return {branch.index: mask for branch, mask in zip(branches, masks, strict=True)}


def calls_of(message: "Message") -> dict[str, str]:
    """Return the names of the tools that a message calls, by the id of the call."""
    return {call.id: call.name for call in getattr(message, "tool_calls", None) or ()}


def tool_of(message: "Message", called: dict[str, str]) -> str | None:
    """The tool that a message is of, which verifiers' harness leaves to the call; None of other messages."""
    return (message.name or called.get(message.tool_call_id)) if message.role == "tool" else None


def labelled(role: str, tools: Iterable[str]) -> str:
    """Write the name of a role, with the names of its tools in brackets."""
    return f"{role} ({', '.join(sorted(tools))})" if tools else role


def observed_roles(rollout: Rollout) -> set[str]:
    """The roles, and the tools, of messages that the model did not sample and that follow a turn of its own."""
    roles: set[str] = set()
    branches = [list(keyed_nodes(branch)) for branch in rollout.branches]
    sampled = {key for branch in branches for key, node in branch if node.sampled}
    for branch in branches:
        called: dict[str, str] = {}
        for key, node in dropwhile(lambda keyed: keyed[0] not in sampled, branch):
            called |= calls_of(node.message)
            if key not in sampled:
                tool = tool_of(node.message, called)
                roles.add(labelled(node.message.role, [tool] if tool else []))
    return roles


def size(masks: Any) -> int | str:
    """Return the number of entries, or for a value without entries its type, for a message."""
    return len(masks) if hasattr(masks, "__len__") else f"a {type(masks).__name__}"
