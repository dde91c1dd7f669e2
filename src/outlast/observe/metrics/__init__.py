"""Runs as Prometheus metrics: printed, in a file, over HTTP; rules for them."""
