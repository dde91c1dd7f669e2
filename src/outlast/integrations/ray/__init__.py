"""Ray: the agents of a job as actors."""
