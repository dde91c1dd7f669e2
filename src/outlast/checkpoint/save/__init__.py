"""From live state to a committed copy."""
