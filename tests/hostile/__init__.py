"""Hostile and damaged files: what they are, what must become of them, and the harness that looks."""
