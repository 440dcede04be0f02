"""What several processes have to agree on, and parameters of which a process holds a part."""
