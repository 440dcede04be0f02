"""Models: the tensors that are cast, the forwards with casts around them, and float32 state dicts."""
