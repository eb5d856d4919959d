"""Bytes only: encodings that know no word about checkpoints."""
