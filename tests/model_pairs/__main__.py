"""Run the pairs: python -m tests.model_pairs [--only PATTERN] [--record]."""

from tests.model_pairs.harness import main

main()
