"""Copies sent from node to node."""
