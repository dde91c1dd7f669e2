"""The writer: the process that digests, commits and keeps what the ranks of a node have staged."""
