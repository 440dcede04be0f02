"""Time, memory and launches of training with mpinit, with torch.amp and with loops written by hand."""
