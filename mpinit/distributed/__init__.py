"""Agreement of several processes, and parameters of which a process has a shard."""
