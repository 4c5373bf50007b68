"""Deadlines of tests, written for an idle machine of 2026, as long as this machine needs them."""

import os
import time

QUICK_S = 0.08
"""A million turns of the loop below, on the machine that the deadlines were written on."""


def _measured() -> float:
    """How many times as long this machine takes, other processes and pytest's own workers included; at least 1."""
    began, total = time.monotonic(), 0
    for number in range(1_000_000):
        total += number
    slower = (time.monotonic() - began) / QUICK_S
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) / (os.cpu_count() or 1)
    return min(max(slower, workers, 1.0), 8.0)


PATIENCE = _measured()


def patient(seconds: float) -> float:
    """`seconds` of an idle machine on this one: what a test waits at most, or a deadline that work has to meet."""
    return seconds * PATIENCE
