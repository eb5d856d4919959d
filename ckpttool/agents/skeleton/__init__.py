"""A user's own model in a process of its own: built, described, saved and loaded by its own framework."""
