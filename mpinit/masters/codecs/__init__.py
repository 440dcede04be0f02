"""Encodings of float32 numbers in fewer bytes: what an optimizer's state is between steps."""
