"""A job of several nodes: membership, leader election, and the connections between agents."""
