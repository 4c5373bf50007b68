"""What passes between orchestrator, trainer and engines on disk: batches one way, weights and metrics the other.

Start with `base.py` (the interface) and `files.py` (the implementation). Imports `rollouts`, `errors`, and
of `monitors` the text of a warning.
"""
