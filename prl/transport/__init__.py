"""Transports carry batches to the trainer, and weights and metrics back.

Start with `files.py`, which the others extend.
"""
