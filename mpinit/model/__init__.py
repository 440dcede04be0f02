"""What happens to models: which tensors are cast, to what, around which forwards, and what leaves in a state dict."""
