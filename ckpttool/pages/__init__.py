"""Pages: HTML about a checkpoint, two side by side, or a run, and drawings of what they compute."""
