"""Tasksets that ship with prl: verifiers v1 plugins, one module each.

Each module can be copied to begin a new one; what they share is which tasks are held out (`splits.py`).
"""
