"""Sharded state under another parallelism."""
