"""Which reruns are made, and what their results mean."""
