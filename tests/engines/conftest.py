"""Real servers for the engine tests: one at a time, each used by a whole file."""
