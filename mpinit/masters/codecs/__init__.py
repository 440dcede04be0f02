"""Encodings of float32 numbers in fewer bytes, for an optimizer's state between steps."""
