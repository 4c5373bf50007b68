"""What a run would take, from its config alone (`dry_run=true`): processes, devices, bytes."""
