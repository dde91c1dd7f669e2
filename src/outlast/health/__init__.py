"""Checks of a node: before it joins a job, and of its devices."""
