"""What every algorithm is: three hooks to override, and the two drivers that the pipeline calls."""

import inspect
import math
import time
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from prl.config.model_reference import FrozenModelConfig, check_reference
from prl.errors import EngineError
from prl.orchestrator.packing import check_streams
from prl.wire import STREAM_FILL

if TYPE_CHECKING:
    from prl.inference.client import ModelPool
    from prl.inference.frozen import FrozenPool
    from prl.rollouts.rollout import Rollout

LossType = Literal["rl", "ce", "ref_kl"]


class Algorithm:
    """Decides the training signal of each token of a rollout.

    Subclass it, set `action_loss_type` to the loss component that sampled tokens feed, and override the hook whose
    moment fits the signal. `config` is the algorithm's own node; `policy_pool` generates with the live policy and scores
    under it, `renderer` is that of its chat template.
    """

    action_loss_type: ClassVar[LossType] = "rl"
    """The loss component of the tokens that the model sampled."""
    group_relative: ClassVar[bool] = False
    """Whether credit is relative to the group, so that a group of one gets none."""

    def __init__(self, config: Any, *, policy_pool: "ModelPool", renderer: Any = None):
        self.config = config
        self.policy_pool = policy_pool
        self.renderer = renderer
        self.pools: list[FrozenPool] = []
        """Frozen models connected by `connect`."""

    @classmethod
    def check(cls, config: Any, where: str) -> None:
        """Raise ConfigError for a config that cannot work; `where` is its key. Called before anything is started."""

    @classmethod
    def check_tasks(cls, config: Any, where: str, tasks: Sequence[Any]) -> None:
        """Likewise for the tasks of an env that the algorithm is to train on."""

    # --- hooks ----------------------------------------------------------------------------------------------------

    async def setup(self) -> None:
        """Connect what the algorithm's own config declares. Called once, before the first rollout."""

    def reserve(self, tasks: Sequence[Any]) -> int:
        """Tokens of `model.max_model_len` to keep free of a rollout: what scoring puts in front of it."""
        return 0

    async def score_rollout(self, rollout: "Rollout") -> None:
        """One rollout on arrival, before its group is complete: rollout-local credit, and any model call."""

    def score_group(self, group: list["Rollout"]) -> None | Awaitable[None]:
        """All rollouts of one task that did not fail, before filters: group-relative credit. May be async."""

    # --- for the hooks --------------------------------------------------------------------------------------------

    async def connect(self, frozen: FrozenModelConfig) -> "FrozenPool":
        """A client of a frozen model, ready to answer; closed when the run ends. Raises DeadlinePassed naming it."""
        if not isinstance(frozen, FrozenModelConfig):
            check_reference(frozen, "the model to connect")
        from prl.inference.frozen import FrozenPool  # configs are composed without loading an HTTP client

        pool = FrozenPool(frozen)
        self.pools.append(pool)
        await pool.wait_ready(frozen.timeout_s)
        return pool

    # --- drivers: the pipeline calls these, nobody overrides them -------------------------------------------------

    async def finalize_rollout(self, rollout: "Rollout") -> None:
        """Score a rollout as it arrives. Errored ones skip the hook; a model that fails makes it an errored one."""
        if rollout.error is not None:
            return
        rollout.seal()
        started = time.monotonic()
        try:
            await self.score_rollout(rollout)
        except EngineError as error:
            rollout.fail(error, "reference")
        rollout.scoring_s = time.monotonic() - started

    async def finalize_group(self, rollouts: list["Rollout"]) -> None:
        """Score the survivors of a group and stamp their streams; after this a rollout is frozen.

        What sampled nothing (the side of a game that was over before its turn) earned nothing either: it is no baseline.
        """
        survivors = [rollout for rollout in rollouts if rollout.error is None and rollout.left_out is None]
        if not survivors:
            return
        scored = self.score_group(survivors)
        if inspect.isawaitable(scored):
            await scored
        for rollout in survivors:
            self._stamp(rollout)

    async def close(self) -> None:
        """Close the connected pools."""
        for pool in self.pools:
            await pool.close()

    def _stamp(self, rollout: "Rollout") -> None:
        """Write the advantage stream and the component weights onto the rollout's samples.

        Tokens that feed `rl` need no weight stream: an absent one means 1.0 on the mask. A stream that a hook has written
        stays as it is.
        """
        rollout.check_seal()
        start = 0
        for sample in rollout.samples:
            end = start + len(sample.token_ids)
            if rollout.advantages is not None:
                sample.advantages = rollout.advantages[start:end]
            if self.action_loss_type != "rl":
                stream = f"{self.action_loss_type}_weights"
                if getattr(sample, stream) is None:
                    setattr(sample, stream, [float(trains) for trains in sample.mask])
                if sample.rl_weights is None:
                    sample.rl_weights = [0.0] * len(sample.token_ids)
            check_streams(sample)
            if not rollout.live and (
                any(sample.ref_kl_weights or ()) or sample.rl_weights is None or any(sample.rl_weights)
            ):
                raise ValueError("a frozen model's rollout feeds the rl or ref_kl loss, which need the policy's own")
            for name in STREAM_FILL:
                if not all(map(math.isfinite, getattr(sample, name) or ())):
                    raise ValueError(f"{name} of a sample holds a number that is not finite")
            start = end
