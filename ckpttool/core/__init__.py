"""Foundation: trees, sources, files, errors, limits and plugins."""
