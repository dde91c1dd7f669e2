"""What is written down about a run, and how it is read again."""
