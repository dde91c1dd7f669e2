"""The node's side: read heartbeats, collect evidence, report hangs."""
