"""Tasks in, micro-batches out: dispatch, credit, filters, batches, packing."""
