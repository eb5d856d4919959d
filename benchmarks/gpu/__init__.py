"""Checks and measurements on a GPU, or on the CPU as a stand-in: `python -m benchmarks.gpu`."""
