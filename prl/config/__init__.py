"""The config: schemas, bounds, composing, and building objects of nodes that name a class by `_target_`.

Start with `schema.py` (the typed root) and `compose.py`. Imports `errors`; `compose.py` and `write.py` alone know the
components, whose constructors are the schemas.
"""
