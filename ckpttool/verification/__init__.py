"""Verify conversions: outputs of agents and of any two models, causes of differences, training steps."""
