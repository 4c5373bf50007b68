"""Where the metrics of a run go: files, the terminal, Weights & Biases, TensorBoard; and text made harmless for them.

Start with `base.py`. `masking.py` and `text.py` are for whoever shows a text. Imports `rollouts`,
`transport` and `errors`.
"""
