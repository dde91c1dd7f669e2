"""The command line of ``outlast run``, and the start of an agent."""
