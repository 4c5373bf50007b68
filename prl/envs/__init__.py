"""Tasksets that ship with prl: verifiers v1 plugins, one module each.

Each module stands alone, so that it can be copied to begin a new one.
"""
