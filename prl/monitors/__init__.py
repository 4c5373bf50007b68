"""Where the metrics of a run go: files, the terminal, Weights & Biases, TensorBoard."""
