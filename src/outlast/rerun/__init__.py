"""The rerun state machine: where a rejected result comes from."""
