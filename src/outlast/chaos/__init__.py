"""Faults made on purpose, and what says whether a run outlasted them."""
