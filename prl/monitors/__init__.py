"""Monitors receive the metrics of a run: files, the terminal, Weights & Biases, TensorBoard, Trackio.

Start with `base.py`.
"""
