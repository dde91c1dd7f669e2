"""In-process restart: a training function is left on a fault and entered again."""
