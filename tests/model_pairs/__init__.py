"""Pairs of models, one in each framework, and the conversions between them that their outputs judge."""
