"""Play tasks: a task and a sampler in, graded rollouts out.

`environment.py` is the way in. `single_turn.py` and `verifiers_env.py` play a group; `multi_turn.py` provides the
agents of an env in this process, `chat_harness.py` the program of a task that needs one.
"""
