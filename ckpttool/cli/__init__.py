"""Command line interface: the only package that imports typer and rich."""

from __future__ import annotations


def main() -> None:
    """Run the command given by the arguments and exit with its status."""
    import atexit
    import gc

    from ckpttool.core import search_paths

    # What a command reads is many objects but hardly any garbage: collecting took up to a fifth of its time.
    gc.set_threshold(100_000, 50, 100)
    atexit.register(gc.freeze)
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
