"""What happens to optimizers: their groups, gradients and steps."""
