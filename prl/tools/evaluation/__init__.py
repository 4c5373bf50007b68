"""Evaluation without training: which models, on which engine, and what their rewards say.

Start with `play.py`; `targets.py` finds the models, `serving.py` their engines, `scores.py` has the statistics.
"""
