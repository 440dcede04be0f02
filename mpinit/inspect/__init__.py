"""What precision does, to look at: reads, never changes."""
