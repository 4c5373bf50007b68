"""A rollout and what becomes of it: trace, samples, packed rows, messages between processes, records on disk.

Start with `rollout.py` and `samples.py`; `components.py` is the table of loss components.
"""
