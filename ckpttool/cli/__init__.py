"""The command line: the only home of typer and rich."""

from __future__ import annotations


def main() -> None:
    """Run the command that the arguments name, and exit with its status."""
    from ckpttool import search_paths

    search_paths.leave_working_directory()
    from ckpttool.cli.app import run

    run()
