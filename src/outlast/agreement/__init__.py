"""Agreement: all ranks do the same after the same step."""
