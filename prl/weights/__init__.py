"""Ways of policy versions from the trainer to the engines: the options of the group `weights`. Start with `base.py`."""
