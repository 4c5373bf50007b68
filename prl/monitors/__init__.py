"""Where the metrics of a run go: files, the terminal, Weights & Biases, TensorBoard."""

from prl.monitors.monitors import Monitors

__all__ = ["Monitors"]
