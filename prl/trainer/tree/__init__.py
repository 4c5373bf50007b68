"""Rows that are trees of tokens: shared prefixes go through the model once, exactly.

Start with `tree.py` (which sequences share) and `attention.py` (who attends to whom), which `blocks.py` computes on a
CPU and `flex.py` on a GPU.
"""
