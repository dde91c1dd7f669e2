"""One agent's part in its cluster."""
