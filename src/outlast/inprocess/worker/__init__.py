"""How a rank leaves its function and enters it again."""
