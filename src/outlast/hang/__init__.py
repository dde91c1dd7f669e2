"""Hangs: heartbeats, timeouts, and who is to blame."""
