"""The source of an env's tasks: which task comes next, and which tasks the policy has learnt enough from."""
