"""Read, convert, check and play reinforcement-learning checkpoints without the program that wrote them."""
