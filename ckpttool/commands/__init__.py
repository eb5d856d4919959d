"""Commands: one library function each, which returns a record and prints nothing."""
