"""Ours beside the peers: whole commands, timed cold in one run, reported as ratios."""
