"""Page through the rollouts of a run in a terminal.

Start with `__main__.py`; `render.py` makes text of them, for `prl.tools.report` too.
"""
