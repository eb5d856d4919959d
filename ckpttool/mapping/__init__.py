"""Mappings between trees: rules with inverses, layer kinds, filling a model."""
