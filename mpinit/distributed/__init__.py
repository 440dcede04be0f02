"""Agreement of several processes, and parameters of which a process holds a shard."""
