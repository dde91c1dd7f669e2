"""What runs inside a rank's own process."""
