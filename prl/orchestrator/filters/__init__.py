"""Filters: rollouts that are not worth training on are dropped, or only noted. Rewards and tokens are never changed."""
