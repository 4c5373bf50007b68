"""The config: from YAML to typed values, and from the nodes of components to objects.

Start with `schema.py` (the typed root), `compose.py` (`to_config`) and `build.py`.
"""
