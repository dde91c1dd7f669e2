"""How a rank runs a step again."""
