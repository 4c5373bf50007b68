"""Transports carry batches to the trainer, and what it publishes back.

Start with `files.py`, which the others extend.
"""
