"""One file per library that executes a network."""
