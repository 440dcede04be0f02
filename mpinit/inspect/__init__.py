"""Reports on precision: they read models and optimizers, and change nothing."""
