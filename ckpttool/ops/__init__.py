"""The verbs: each opens, works, returns a frozen record and prints nothing."""
