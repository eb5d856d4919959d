"""The matrix of everyday checkpoints: ordinary files, converted, loaded and compared by their frameworks."""
