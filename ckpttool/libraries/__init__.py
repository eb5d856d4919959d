"""RL libraries: the canonical agent, recognition, and one table per library."""
