"""outlast: training that outlasts its hardware."""
