"""Parts of tensors under another parallelism."""
