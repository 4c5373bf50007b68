"""Play tasks: a task and a sampler in, graded rollouts out.

`environment.py` is the way in. `group.py` plays a group; `multi_turn.py` provides the agents of an env in this process,
`harness.py` what a task needs that is played by verifiers' harness.

What keeps an env's code from holding the run: `grading.py` over `workers.py` while it grades, `isolation.py` for what
runs in this process.
"""
