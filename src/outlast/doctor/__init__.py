"""``outlast doctor``: what would go wrong on this machine, found before a job, each with its cure."""
