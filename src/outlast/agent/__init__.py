"""What runs once on each node, free of torch: it owns the workers."""
