"""What all ranks do after the same step, and how they agree on that step."""
