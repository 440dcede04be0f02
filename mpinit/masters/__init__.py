"""What a float32 master and its weight are between steps."""
