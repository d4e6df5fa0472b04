"""What lets engines keep their KV cache in kvtier: a module for each, which imports its engine."""
