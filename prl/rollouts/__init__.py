"""verifiers episodes on one side, `Rollout` and `TrainingSample` on the other."""
