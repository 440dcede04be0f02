"""Float32 masters of 16-bit weights."""
