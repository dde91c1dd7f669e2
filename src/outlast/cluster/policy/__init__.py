"""Decisions of a cluster: who leads, which nodes take part, which ranks each has."""
