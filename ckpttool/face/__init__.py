"""A checkpoint in Python: handles of its tensors by name, modules as mappings, how both are shown."""
