"""The quantiles by which both processes tell how a number is spread."""

QUANTILES = {"min": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}
"""By name, the last part of a metric's key."""
