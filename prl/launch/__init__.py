"""From a config to running processes: prepare what can be refused, start engines and trainer, assemble the loop.

Start with `builder.py` (the road) and `launcher.py` (the interface).
"""
