"""The source of an env's tasks: which task comes next, and which the policy has learnt enough from.

Start with `base.py`; `pools.py` is the one that comes with prl.
"""
