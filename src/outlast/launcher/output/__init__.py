"""What the launcher prints, and the logs of the ranks."""
