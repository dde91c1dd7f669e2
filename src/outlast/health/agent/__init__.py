"""The checks of a node that need no torch, and the command that runs them."""
