"""Code that depends on private parts of torch or works around a fault of torch: one file for each of them."""
