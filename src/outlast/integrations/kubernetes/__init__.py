"""Kubernetes: manifests rendered and linted, progress reported."""
