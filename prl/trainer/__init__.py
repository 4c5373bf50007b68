"""The torch side: it knows tensors and no algorithms."""
