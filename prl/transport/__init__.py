"""What passes between orchestrator, trainer and engines on disk: batches one way, weights and metrics the other.

Start with `files.py`, which the others extend. Imports `rollouts`, `errors`, and
of `monitors` the text of a warning.
"""
