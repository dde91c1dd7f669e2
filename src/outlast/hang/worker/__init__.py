"""The rank's side: heartbeats and progress in collectives."""
