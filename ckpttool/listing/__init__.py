"""Listings: what a path contains, without reading its tensors: entries, modules, layers, agents, folders."""
