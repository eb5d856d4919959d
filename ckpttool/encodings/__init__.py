"""File encodings without any notion of a checkpoint."""
