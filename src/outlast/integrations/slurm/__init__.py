"""Slurm: jobs submitted, supervised and linted."""
