"""The command line: the only home of typer and rich."""

from __future__ import annotations


def main() -> None:
    """Run the command that the arguments name, and exit with its status."""
    from ckpttool.core import search_paths

    search_paths.leave_working_directory()
    try:
        from ckpttool.cli.app import run
    except (ImportError, MemoryError, OSError) as error:
        # A limit of memory or of open files may be too low even for this.
        import sys

        if sys.stderr is not None:
            sys.stderr.write(f"ckpttool: cannot start: {error or 'out of memory'}\n")
        sys.exit(2)
    run()
