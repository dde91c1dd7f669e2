"""What people do with copies: list, verify, prune, release, convert."""
