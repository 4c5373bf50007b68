"""The directory of a run: its files, its lock, its result, what it was made with, and how a run goes on.

Start with `run_dir.py` and `resume.py`.
"""
