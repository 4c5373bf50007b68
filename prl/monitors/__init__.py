"""Where the metrics of a run go: files, the terminal, Weights & Biases, TensorBoard; and text made harmless for them.

Start with `base.py`. Imports `config`, `rollouts` and `transport`.
"""
