"""A step of training, written once and run by every backend: the proof of an optimizer's state."""
