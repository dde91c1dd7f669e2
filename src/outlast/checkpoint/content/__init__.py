"""What a rank's files hold: tensors, typed JSON, and the digests of both."""
