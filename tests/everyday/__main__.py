"""Run the matrix: python -m tests.everyday [--only PATTERN] [--columns tf,torch] [--record]."""

from tests.everyday.matrix import main

main()
