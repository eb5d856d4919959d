"""The command line: the only home of typer and rich."""
