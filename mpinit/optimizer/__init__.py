"""Optimizers: their groups, gradients and steps."""
