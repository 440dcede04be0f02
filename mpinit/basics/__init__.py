"""Helpers that do not depend on mixed precision: dtypes, reversible patches, nested containers, the logger."""
