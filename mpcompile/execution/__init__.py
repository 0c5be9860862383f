"""What lives while a compiled model runs. Knows nothing of graphs."""
