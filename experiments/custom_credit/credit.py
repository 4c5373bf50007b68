"""Credit for each token, by hand."""


def alternating(group):
    """a, a/2, a, a/2, ... on the sampled tokens, where a is the advantage of grpo: reward - mean of the group."""
    mean = sum(rollout.reward for rollout in group) / len(group)
    return [_pattern(rollout, rollout.reward - mean) for rollout in group]


def _pattern(rollout, a):
    sampled, credit = 0, []
    for trains in (trains for sample in rollout.samples for trains in sample.mask):
        credit.append((a if sampled % 2 == 0 else a / 2) * trains)
        sampled += trains
    return credit
