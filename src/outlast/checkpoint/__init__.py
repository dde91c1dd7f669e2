"""Training state to verified copies on disk and back."""
