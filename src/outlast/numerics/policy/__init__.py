"""When a number is bad, and what is done about it."""
