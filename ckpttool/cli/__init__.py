"""Command line interface: the only package that imports typer and rich."""

from __future__ import annotations


def main() -> None:
    """Run the command given by the arguments and exit with its status."""
    from ckpttool.core import search_paths

    search_paths.leave_working_directory()
    try:
        from ckpttool.cli.app import run
    except (ImportError, MemoryError, OSError) as error:
        # Even this may fail under a very low limit of memory or open files.
        import sys

        if sys.stderr is not None:
            sys.stderr.write(f"ckpttool: cannot start: {error or 'out of memory'}\n")
        sys.exit(2)
    try:
        run()
    except KeyboardInterrupt:  # a second one, while the first ends the program
        import sys

        sys.exit(130)
