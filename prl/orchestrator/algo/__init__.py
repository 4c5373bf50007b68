"""Algorithms, one module each: a class turns rollouts into advantages and per-token weights on the loss components."""
