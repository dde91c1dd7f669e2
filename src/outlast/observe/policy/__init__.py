"""Event records, and the ledger of time that is computed from them."""
