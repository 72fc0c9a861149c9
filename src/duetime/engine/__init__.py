"""What an instance does with the shards it owns: group commit, look-ahead, the fire loop, flow control."""
