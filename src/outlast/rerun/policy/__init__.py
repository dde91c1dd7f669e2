"""The decisions about reruns."""
