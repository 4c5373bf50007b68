"""Algorithms: one module each. A class maps rollouts to per-token weights on the loss components."""
