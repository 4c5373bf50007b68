"""What `build_tiny_models` teaches, and how what it made is graded."""
