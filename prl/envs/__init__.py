"""Tasksets that ship with prl: verifiers v1 plugins, one module each.

Each module can be copied to begin a new one. They share how tasks are held out for evaluation (`splits.py`).
"""
