"""Authenticated connections between the agents of one job."""
