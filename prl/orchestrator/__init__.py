"""Tasks in, micro-batches out: start groups, credit them, filter, batch, pack, ship, and keep policy versions in order.

Start with `orchestrator.py` (the loop) and `staleness.py` (the rule of versions). Knows no trainer and no launcher.
"""
