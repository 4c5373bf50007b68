"""opd that assigns an advantage as well."""

from dataclasses import dataclass

from prl.algorithms.opd import OPDAlgorithm


@dataclass(kw_only=True)
class OPDWithAdvantages(OPDAlgorithm):
    """opd, with `scale` times the advantage of grpo on every sampled token; 0 assigns none, as opd itself."""

    scale: float = 1.0

    def score_group(self, group):
        mean = sum(rollout.reward for rollout in group) / len(group)
        for rollout in group if self.scale else ():
            rollout.assign_advantages(self.scale * (rollout.reward - mean))
