"""Loss scaling: how the scale moves, and the context around the backward pass."""
