"""From a copy, each byte verified, to live state, in the world that saved it or another."""
