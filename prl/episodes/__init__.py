"""Play tasks: a task and a sampler in, graded rollouts out."""
