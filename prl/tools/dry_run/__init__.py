"""A prediction of what a run would take, from its config alone (`dry_run=true`): processes, devices, bytes.

Start with `plan.py`; `memory.py` is the arithmetic, `shape.py` counts a model's parameters. `rehearsal.py` plays a
first step with invented models.
"""
