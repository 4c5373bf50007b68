"""Which logprobs of a sampler are measurements."""

import math

SENTINEL = -9999.0
"""What vLLM sends for a logprob that it does not have: it clamps -inf, which JSON cannot express."""
SENTINEL_CEILING = -9000.0
"""Everything this low counts as the sentinel: bfloat16, for one, rounds -9999 to -9984."""


def is_measured(value: float) -> bool:
    """Whether `value` is a logprob: not NaN, not infinite and not the sentinel."""
    return math.isfinite(value) and value > SENTINEL_CEILING
