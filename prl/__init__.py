"""prl: asynchronous reinforcement learning and distillation of language models."""
