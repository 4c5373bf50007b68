"""Tasksets that ship with prl: verifiers v1 plugins, one module each.

Each module can be copied to begin a new one. They share a few base classes and the split (`base.py`).
"""
