"""Sharded state under another parallelism, and which one to go on in."""
