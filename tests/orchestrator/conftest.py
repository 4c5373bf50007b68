"""A toy run, as in tests/support/orchestrating.py."""

from orchestrating import *  # noqa: F403  # a toy run and its parts
