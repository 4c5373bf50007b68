"""Algorithms: a class turns rollouts into advantages and into weights of each token in the three loss components.

Start with `base.py` (the hooks) and `grpo.py` (a whole algorithm); `advantage.py` has the formulas.
"""
