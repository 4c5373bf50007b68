"""The torch side: it sees tensors and weights of tokens, and knows no algorithm.

Start with `worker.py` (the loop) and `trainer.py` (a step).
"""
