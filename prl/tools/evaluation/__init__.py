"""Evaluation without training: which models, on which engine, and what their rewards say."""
