"""The launcher: one agent on each node, free of torch, which owns the workers of its node."""
