"""Bytes between processes of one job."""
