"""Preemption: notices, a last save, and the exit."""
