"""Decisions about copies: which are made, trusted, loaded, kept and replicated."""
