"""Configuration: schemas, checks across fields, hints, and building objects by `_target_`."""
