"""Small things that know nothing of mixed precision: dtypes, reversible changes, walking containers, the logger."""
