"""What is decided about the health of nodes and devices, without measuring anything."""
