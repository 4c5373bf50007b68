"""The base class of all algorithms: options, hooks to override, and the two drivers that the pipeline calls.

An algorithm gives each token of a rollout

- an advantage, if its loss needs one (`rollout.assign_advantages`)
- a weight in each loss component (`prl.rollouts.components`)

The pipeline calls an instance in this order: constructor with options, `check`, `attach` with the run's models, `setup`
once, `finalize_rollout` for every finished rollout, `finalize_group` for every complete group, and `finalize_batch` for
every batch. No later stage changes the samples.

`compatibility.py` checks an algorithm against the run.
"""

import inspect
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

from prl.algorithms.reference import KLConfig, ReferenceLogprobs, ReferenceOptions
from prl.base.errors import EngineError
from prl.base.logged import EnvPart
from prl.config.model_reference import DEMONSTRATIONS, FrozenModelConfig, SourceConfig
from prl.rollouts.rollout import Rollout

if TYPE_CHECKING:
    from renderers.base import Renderer

    from prl.engines.base import Connect
    from prl.engines.chat import MessageSource
    from prl.engines.client import ModelPool
    from prl.engines.frozen import ReferencePool
    from prl.engines.tokenizers import TokenizerProbe
    from prl.rollouts.messages import TrainingSample


@dataclass(kw_only=True)
class Algorithm(EnvPart):
    """Decides the advantage and the loss weights of each token of a rollout.

    Subclass it, set `action_loss_type`, and override one of the hooks: `score_rollout`, `score_group`, `score_batch`.
    Options are keyword-only dataclass fields, or arguments of an `__init__` that passes the rest on (`**options`) to
    `super().__init__`.
    Annotate a frozen model of your own as `FrozenModelConfig`: then it is checked before the run starts, and `connect`
    makes its client.

    Hooks may write the per-token weights of any component on a sample, e.g. `sample.ce_weights`, one float per token.
    The defaults are:

    - Sampled tokens have weight 1 in the component `action_loss_type` and weight 0 in every other.
    - Weights that a hook wrote replace the default, with one exception: if weights of the component `action_loss_type`
      are positive only on tokens that the model did not sample (observations), the sampled tokens keep weight 1.
      All zeros, or a weight on any sampled token, replace the default: zeros then leave tokens out.
    """

    sampling: SourceConfig = field(default_factory=SourceConfig)
    """Source of rollouts: `sampling.source` is `policy`, a frozen model {name, base_url} or `demonstrations`."""
    mask_truncated: bool = False
    """If a length limit cut a rollout off, its sampled tokens have no weight in any loss. Its reward still counts in
    the group's baseline."""
    step: int = field(default=1, init=False, repr=False)
    """The step whose batch is being collected, from 1 to `max_steps`."""
    max_steps: int = field(default=1, init=False, repr=False)
    """The number of steps of the run."""

    action_loss_type: ClassVar[str] = "rl"
    """The loss of sampled tokens, a name in `prl.rollouts.components.COMPONENTS`."""
    group_relative: ClassVar[bool] = False
    """True where advantages are relative to the group: a group of one then has none."""
    reads_reward: ClassVar[bool] = True
    """True where the training signal depends on rewards."""
    RETIRED: ClassVar[dict[str, tuple[dict[str, Any], str]]] = {
        "kl": (
            vars(KLConfig()),
            "it is added to tokens of the rl loss (algo=grpo, reinforce_pp, max_rl, turn, reward, echo, custom); a "
            "class of your own that has some inherits prl.algorithms.kl.KLPenalty",
        )
    }
    """Options that all algorithms once had: their defaults, which configs of older runs hold, and who has them now."""

    @property
    def waits_for_group(self) -> bool:
        """Return whether the rollouts of a task enter a batch together. False: one by one, as they finish."""
        # A class without a hook for groups compares nothing: its rollouts need not wait for each other.
        return type(self).score_group is not Algorithm.score_group

    def attach(
        self,
        *,
        policy_pool: "ModelPool",
        renderer: "Renderer",
        clients: "Connect | None" = None,
        probe: "TokenizerProbe | None" = None,
    ) -> None:
        """Hand over the models of the run. Called once, before `setup`.

        Args:
            policy_pool: the live policy, to sample from or to score with.
            renderer: the renderer of the policy's chat template.
            clients: makes the client of a frozen model; None = each has an address.
            probe: probe of the policy's tokenizer, to compare those of frozen models with; None = no comparison.
        """
        self.policy_pool = policy_pool
        self.policy_renderer = renderer
        self.clients = clients
        self.probe = probe
        self.pools: list[ReferencePool] = []
        """Clients of frozen models: of the source of the rollouts, and those that `connect` made."""

    # --- hooks ----------------------------------------------------------------------------------------------------

    def check(self, where: str) -> None:
        """Raise ConfigError for options that contradict each other; `where` is the algorithm's config key.

        Bounds of one option belong beside it, as `Annotated[float, Ge(0)]`. A subclass of an
        algorithm that has a check calls `super().check(where)` first.
        """

    async def setup(self) -> None:
        """Connect the models that the algorithm's own options name. Called once, before the first rollout."""

    def reserve(self, tasks: Sequence[Any]) -> int:
        """Tokens of `model.max_model_len` to keep free of a rollout: what scoring puts in front of it."""
        return 0

    async def score_rollout(self, rollout: Rollout) -> None:
        """Assign advantages or weights to one finished rollout, without its group. Model calls belong here.

        To give up one rollout instead of the run, call `rollout.fail(error, kind)`.
        """

    def score_group(self, group: list[Rollout]) -> Awaitable[None] | None:
        """Assign advantages to the active rollouts of one task, before filters. May be async."""

    def score_batch(self, groups: list[list[Rollout]]) -> None:
        """Assign advantages that need all of an env's rollouts in a batch, before `post_batch` filters.

        `groups` are the rollouts of each task. What `score_group` has assigned stands where this assigns nothing.
        """

    def trainer_references(self) -> set[str]:
        """Names of the trainer's models that its samples name (`Reference.model`): `initial`, `ema:0.999`, `lagged:16`.

        An algorithm with a reference of its own there adds its name, and sets `sample.reference`.
        """
        return set()

    def observe(self, group: list[Rollout]) -> None:
        """Get the rollouts of a finished group with their advantages, failed ones too, before `pre_batch` filters.

        Where rollouts enter batches one by one, each alone. What it remembers is for `state_dict` to keep.
        """

    def observe_batch(self, rollouts: list[Rollout]) -> None:
        """Get the env's rollouts of a batch that is trained, with those that filters dropped from it."""

    # --- for the hooks --------------------------------------------------------------------------------------------

    async def connect(self, frozen: FrozenModelConfig, probe: "TokenizerProbe | None" = None) -> "ReferencePool":
        """Make the client of a frozen model and wait until it answers. The client is closed when the run ends.

        A model without `base_url` is one that the launcher hosts: its URL and token come with the run.

        Args:
            frozen: The model.
            probe: Probe of the tokenizer that it has to have; None = the policy's.

        Raises:
            ConfigError: `frozen` is not a usable reference, or the model has another tokenizer.
            DeadlinePassed: the endpoint, which the message names, did not answer in time.
        """
        pool = self.client_of(frozen)
        await pool.wait_ready(frozen.timeout_s)
        probe = probe or self.probe
        if probe is not None:
            await pool.require_tokenizer(probe)
        return pool

    async def connect_scorer(self, options: ReferenceOptions, frozen: Any, limit: int = 32) -> ReferenceLogprobs:
        """Connect a frozen model that scores rollouts as `options` say, with so many requests in flight.

        Raises what `connect` raises.
        """
        if options.align is None:
            return options.scorer(await self.connect(frozen), limit)
        # Another tokenizer is the exception, and its modules load renderers, which composing a config does not need.
        from prl.algorithms.alignment import AlignedLogprobs
        from prl.engines.renderer import make_renderer
        from prl.engines.tokenizers import TokenizerProbe, load_tokenizer

        path = frozen.tokenizer or frozen.name
        tokenizer = load_tokenizer(path, f"the frozen model {frozen.name!r}: tokenizer")
        pool = await self.connect(frozen, TokenizerProbe.of(tokenizer, path))
        renderer = make_renderer(tokenizer, name_key=f"the chat template of the frozen model {frozen.name!r}: renderer")
        return AlignedLogprobs(pool, limit, self.policy_renderer, renderer, self.log)

    def source(self) -> "ModelPool | MessageSource":
        """Return what the rollouts are sampled from, before anybody has waited for it."""
        if self.sampling.source == DEMONSTRATIONS:
            from prl.engines.chat import Demonstrations

            return Demonstrations(self.sampling.demo_key)
        source = self.sampling.source
        return self.client_of(source) if isinstance(source, FrozenModelConfig) else self.policy_pool

    def client_of(self, frozen: FrozenModelConfig) -> "ReferencePool":
        """The client of a frozen model, as `connect` makes it, before anybody has waited for the model."""
        from prl.engines.frozen import clients_of  # configs are composed without loading an HTTP client

        pool = (self.clients or clients_of({}))(frozen)
        self.pools.append(pool)
        return pool

    # --- drivers, called by the pipeline and never overridden -----------------------------------------------------

    async def start(self) -> None:
        """Connect what `setup` declares. Raises what `connect` raises."""
        await self.setup()

    def begin_step(self, step: int, max_steps: int) -> None:
        """Learn that the batch of `step` is collected from now on, of a run of `max_steps` steps."""
        self.step = step
        self.max_steps = max_steps

    async def finalize_rollout(self, rollout: Rollout) -> None:
        """Score a finished rollout, unless it has failed. If a model fails, the rollout fails."""
        if not rollout.is_active:
            return
        # From here on hooks may write streams only. `_write_streams` refuses a sample whose tokens have changed since.
        rollout.seal = rollout.tokens_hash()
        started = time.monotonic()
        try:
            await self._score(rollout)
        except EngineError as error:
            rollout.fail(error, "reference")
        rollout.scoring_s = time.monotonic() - started

    async def finalize_group(self, rollouts: list[Rollout]) -> None:
        """Score the active rollouts of a group and write advantages and weights into their samples.

        Rollouts that failed or sampled nothing are left out, so that their rewards do not enter a group's baseline.
        """
        survivors = [rollout for rollout in rollouts if rollout.is_active]
        scored = self.score_group(survivors) if survivors else None
        if inspect.isawaitable(scored):
            await scored
        for rollout in survivors:
            # Scoring may have given up some of them (`rollout.fail`).
            if rollout.is_active:
                self._write_streams(rollout)

    def finalize_batch(self, groups: list[list[Rollout]]) -> None:
        """Score the rollouts of a batch, and write advantages and weights again. Raises ValueError for bad ones."""
        if type(self).score_batch is not Algorithm.score_batch:
            self.score_batch(groups)
            for rollout in chain.from_iterable(groups):
                self._write_streams(rollout, again=True)

    async def close(self) -> None:
        """Close the clients of frozen models."""
        for pool in self.pools:
            await pool.close()

    async def _score(self, rollout: Rollout) -> None:
        """Make the model calls that a finished rollout needs."""
        await self.score_rollout(rollout)

    def _weigh(self, sample: "TrainingSample") -> None:
        """Write weights beside those of the hooks and the defaults, once for each sample."""

    def _write_streams(self, rollout: Rollout, *, again: bool = False) -> None:
        """Write advantages and component weights onto the samples of a rollout. Raises ValueError for bad ones.

        Args:
            rollout: scored by the hooks.
            again: `_weigh` has had its samples: its weights depend on no advantage.
        """
        # With these come the messages, which composing a config does not need.
        from prl.algorithms import credit
        from prl.rollouts.packing import check_streams

        if rollout.seal not in (None, rollout.tokens_hash()):
            raise ValueError("token_ids or mask of a sample were changed: an algorithm may write its streams only")
        credit.write_advantages(rollout)
        for sample in rollout.samples:
            credit.default_weights(sample, self.action_loss_type)
            if not again:
                self._weigh(sample)
            check_streams(sample)
            credit.check_finite(sample)
            if sample.pictures:
                credit.leave_out_pictures(sample)
            # After the checks, so that the mistake of a hook shows in every rollout.
            if self.mask_truncated and rollout.is_truncated:
                credit.leave_out_sampled(sample)
            if not rollout.live:
                credit.check_source(sample)
