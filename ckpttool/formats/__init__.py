"""On-disk formats: one module each, with detection, reading and writing."""
