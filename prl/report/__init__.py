"""What runs left in their directories, as pages and tables. Nothing here starts or changes a run."""
