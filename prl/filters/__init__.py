"""Filters: rollouts that are not worth training on are dropped, or only counted. Rewards and tokens are never changed.

Start with `base.py`.
"""
