"""Comparison of what ranks should hold alike, to find silent corruption."""
