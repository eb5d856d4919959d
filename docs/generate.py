"""Writes docs/cli.md from the commands' own --help and docs/kinds.md from the tables of layer kinds.

--check only says whether the pages are up to date.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

# Plain text of one width, whatever terminal and settings the writer has.
PLAIN = {"COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1", "TYPER_USE_RICH": "0", "PYTHONPATH": str(ROOT)}
# `python -m ckpttool` would call itself that in its usage lines.
PROGRAM = "import sys; sys.argv[0] = 'ckpttool'; from ckpttool.cli import main; main()"

HEAD = """# The commands

Made by `python docs/generate.py` from `ckpttool COMMAND --help`; do not edit it by hand.
What the exit statuses mean is in [exit_codes.md](exit_codes.md), what `--json` prints in [json.md](json.md).
"""


def commands() -> list[str]:
    """Return the commands' names in the order of the program's help."""
    sys.path.insert(0, str(ROOT))
    from ckpttool.cli.app import app

    return [str(c.name or c.callback.__name__) for c in app.registered_commands if c.callback is not None]


def text_of_help(*arguments: str) -> str:
    """Return what the program prints for these arguments and --help."""
    command = [sys.executable, "-c", PROGRAM, *arguments, "--help"]
    done = subprocess.run(  # noqa: S603  # our own program
        command, capture_output=True, text=True, check=True, env={**os.environ, **PLAIN}
    )
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def page() -> str:
    """Return the whole page of the commands."""
    sections = [("ckpttool", ()), *((f"ckpttool {name}", (name,)) for name in commands())]
    parts = [f"## {title}\n\n```text\n{text_of_help(*arguments)}\n```\n" for title, arguments in sections]
    return "\n".join([HEAD, *parts])


def main() -> int:
    """Write the pages, or compare them on --check."""
    commands_page = page()
    # Beside this file; the package must be found first.
    import kinds

    old = []
    for name, made in (("cli.md", commands_page), ("kinds.md", kinds.page())):
        file = DOCS / name
        if sys.argv[1:] != ["--check"]:
            file.write_text(made, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != made:
            old.append(file)
    for file in old:
        sys.stderr.write(f"{file.relative_to(ROOT)} is out of date: python docs/generate.py\n")
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
