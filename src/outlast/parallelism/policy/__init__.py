"""Decisions about parallelism: parts of tensors, layouts of jobs."""
