"""Train again from the batches that a run kept: the same weights bit by bit, or where they first differ."""
