"""Faults, and the recovery that answers each of them."""
