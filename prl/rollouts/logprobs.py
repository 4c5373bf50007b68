"""Logprobs of a sampler, and which of them are measurements."""

SENTINEL_CEILING = -9000.0
"""Everything this low counts as the sentinel -9999.0: bfloat16, for one, rounds that to -9984.

Servers send the sentinel for a logprob that they do not have: they clamp -inf, which JSON cannot express.
"""


def is_measured(value: float) -> bool:
    """Return whether `value` is a logprob: not NaN, not infinite and not the sentinel."""
    return SENTINEL_CEILING < value < float("inf")
