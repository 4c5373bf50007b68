"""Play tasks: a task and a sampler in, graded rollouts out.

Start with `environment.py`; `group.py` plays a group, `grading.py` grades it in processes of their own.
"""
