"""The directory of a run: its files, its lock, its result, and what it was made with.

Start with `run_dir.py`; `prl/launch/resume.py` has how a run goes on.
"""
