"""Groups of earlier batches that a batch trains on again: `curriculum.replay` of their env."""

from collections.abc import Mapping, Sequence

from prl.algorithms.base import Algorithm
from prl.base.errors import ConfigError
from prl.config.orchestrator import OrchestratorConfig
from prl.curriculum.replay import ReplayConfig
from prl.orchestrator.batcher import Batcher
from prl.orchestrator.state import SavedGroup, all_restored, saved_group
from prl.orchestrator.types import Group, TrainEnv
from prl.rollouts.rollout import Rollout, Stage


def check_replay(options: ReplayConfig, where: str, algorithm: Algorithm, config: OrchestratorConfig) -> None:
    """Raise ConfigError for options that nothing reads, or that leave nothing to replay; `where` is their key."""
    for key, default in (("max_age", ReplayConfig.max_age), ("max_uses", ReplayConfig.max_uses)):
        if not options.share and getattr(options, key) != default:
            raise ConfigError(f"{where}.{key} is given, but nothing reads it: {where}.share is 0")
    why = "with orchestrator.max_async_level=0 or strict_async_level=true a step may train on nothing of an earlier one"
    if algorithm.action_loss_type != "rl":
        why = f"groups are replayed for their advantages, and {type(algorithm).__name__} assigns none"
    if options.share and (config.exact_age or algorithm.action_loss_type != "rl"):
        raise ConfigError(f"{where}.share={options.share:g}: {why}: leave {where}.share at 0")


class Replay:
    """Keeps groups that were trained on, and says which of them the batch of a step trains on again.

    Invariants: step n is offered no group that started before version n-1-`age_limit`, or that was replayed `max_uses`
    times. What `take(n)` returns is what `room(n)` left out of the batch.
    """

    def __init__(self, envs: Sequence[TrainEnv], batcher: Batcher, age_limit: int):
        self.batch_size, self.size_of, self.age_limit = batcher.size, batcher.size_of, age_limit
        self.units = {env.name: 1 if batcher.counts_tokens else env.rollouts_per_group for env in envs}
        """Smallest part of a batch that an env can fill: a group's rollouts, or one token."""
        self.envs = envs
        self.shares = self._shares()
        """Share of the whole batch that is replayed of each env, by the weights that the step began with."""
        self.groups: list[Group] = []
        """The groups that are kept, the newest policy first."""

    def _shares(self) -> dict[str, float]:
        weights = {env.name: 0.0 if env.ended else env.weight for env in self.envs}
        total = sum(weights.values()) or 1.0
        return {env.name: env.curriculum.replay.share * weights[env.name] / total for env in self.envs}

    def state_dict(self) -> list[SavedGroup]:
        """Return the groups that are kept, as they are now."""
        return [saved_group(group) for group in self.groups]

    def load_state_dict(self, state: Sequence[SavedGroup], envs: Mapping[str, TrainEnv]) -> None:
        """Keep the groups of an earlier part of the run."""
        self.groups = all_restored(state, envs)

    def room(self, step: int) -> int:
        """Return what the batch of `step` takes of new rollouts, in rollouts or tokens as the batch counts."""
        self.shares = self._shares()
        return self.batch_size - sum(self.size_of(trained(group)) for group in self._chosen(step))

    def take(self, step: int, groups: Sequence[Group]) -> list[Rollout]:
        """Return the rollouts that `step` replays. Keeps the new `groups` that it trains on, for later steps."""
        chosen = self._chosen(step)
        for group in chosen:
            group.uses += 1
        new = [group for group in reversed(groups) if group.env.curriculum.replay.share]
        # By the age that they have at the next step: what is too old then is forgotten now.
        self.groups = [group for group in (*new, *self.groups) if self._is_usable(group, step + 1)]
        self.groups.sort(key=lambda group: -group.start_version)
        return [rollout for group in chosen for rollout in trained(group)]

    def _chosen(self, step: int) -> list[Group]:
        left = {env: self._budget(env, step) for env in self.shares}
        chosen = []
        for group in self.groups:
            size = self.size_of(trained(group))
            if size <= left[group.env.name] and self._is_usable(group, step):
                left[group.env.name] -= size
                chosen.append(group)
        return chosen

    def _budget(self, env: str, step: int) -> int:
        """Return what `step` may replay of an env: whole groups, of which many steps together have the env's share."""
        groups = self.shares[env] * self.batch_size / self.units[env]
        return self.units[env] * (int(groups * step + 1e-9) - int(groups * (step - 1) + 1e-9))  # products are rounded

    def _is_usable(self, group: Group, step: int) -> bool:
        options = group.env.curriculum.replay
        young = step - 1 - group.start_version <= min(options.max_age, self.age_limit)
        return young and group.uses < options.max_uses and any(any(r.advantages or ()) for r in trained(group))

    def metrics(self, replayed: list[Rollout]) -> dict[str, float]:
        """Return the metrics of a step that replays these rollouts; empty where no env replays."""
        if not any(env.curriculum.replay.share for env in self.envs):
            return {}
        share = self.size_of(replayed) / self.batch_size
        return {"replay/rollouts": len(replayed), "replay/share": share, "replay/kept": len(self.groups)}


def trained(group: Group) -> list[Rollout]:
    """Return the rollouts of a group that were trained on."""
    return [rollout for rollout in group.rollouts if rollout.stage is Stage.TRAINED]
