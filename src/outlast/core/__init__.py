"""Decisions: pure, standard library only, time passed in."""
