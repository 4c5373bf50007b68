"""What one sees of a run: console, metrics.jsonl, wandb."""
