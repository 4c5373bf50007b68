"""Run directories read back: a page for a run, a page and tables for a sweep."""
