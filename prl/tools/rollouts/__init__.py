"""Page through the rollouts of a run in a terminal."""
