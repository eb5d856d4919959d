"""Runs the command line as `python -m ckpttool`."""

from ckpttool.cli import main

main()
