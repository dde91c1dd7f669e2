"""Who has been silent for too long, whether it is hung, and who caused it."""
