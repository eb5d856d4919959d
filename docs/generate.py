"""Writes reference pages: cli.md from --help, api.md from docstrings, kinds.md and limits.md from the code.

everyday.md and model_pairs.md come from the recorded results of tests/everyday and tests/model_pairs, gpu.md
and its plots from benchmarks/results.

--check only says whether the pages are up to date.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

# Plain text of one width, whatever terminal and settings the writer has.
PLAIN = {"COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1", "TYPER_USE_RICH": "0", "PYTHONPATH": str(ROOT)}
# `python -m ckpttool` would call itself that in its usage lines.
PROGRAM = """
import json, sys
from ckpttool.cli import main
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["ckpttool", *arguments, "--help"]
    try:
        main()
    except SystemExit as done:
        assert not done.code, arguments
    print("\\0", end="")
"""

HEAD = """# Commands

Made by `python docs/generate.py` from `ckpttool COMMAND --help`; do not edit it by hand.
See also [exit statuses](exit_codes.md) and [JSON documents](json.md).
"""


def commands() -> list[str]:
    """Return the commands' names in the order of the program's help."""
    sys.path.insert(0, str(ROOT))
    from ckpttool.cli.app import COMMANDS

    return [each.name for each in COMMANDS]


def texts_of_help(every: Sequence[Sequence[str]]) -> list[str]:
    """Return what the program prints for each of these arguments and --help."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(every)]
    done = subprocess.run(  # noqa: S603  # our own program
        command, capture_output=True, text=True, check=True, env={**os.environ, **PLAIN}
    )
    texts = done.stdout.split("\0")[:-1]
    return ["\n".join(line.rstrip() for line in text.strip().splitlines()) for text in texts]


def page() -> str:
    """Return the whole page of the commands."""
    every: list[tuple[str, ...]] = [(), *((name,) for name in commands())]
    told = zip(every, texts_of_help(every), strict=True)
    parts = [f"## {' '.join(('ckpttool', *words))}\n\n```text\n{text}\n```\n" for words, text in told]
    return "\n".join([HEAD, *parts])


LIMITS = """# Limits

Made by `python docs/generate.py` from `ckpttool/core/limits.py`; do not edit it by hand. `ckpttool limits` lists
the values that hold on your machine.

A limit stands where the size of a file bounds nothing: what a few bytes can declare, repeat or unpack to. An
error names the limit that was met. `ckpttool --limit NAME=N` before the command changes one, for a file that
you trust, and `CKPTTOOL_LIMITS=NAME=N,...` in the environment does it for all commands; sizes may be written
as `64K`, `512M`, `2G`. In Python it is `with ckpttool.core.limits.using(ckpttool.core.limits.Limits(members=...)):`.

| limit | default | of what |
|---|---:|---|
"""  # noqa: E501


def limits_page() -> str:
    """Return the page of the limits."""
    from ckpttool.core import limits

    fields = dataclasses.fields(limits.Limits)
    rows = [(each.name, _shown(each.name, each.default), each.metadata["meaning"]) for each in fields]
    return LIMITS + "".join(f"| `{name}` | {value} | {meaning} |\n" for name, value, meaning in rows)


def _shown(name: str, value: int) -> str:
    units = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
    for unit, size in units if name.endswith(("bytes", "memory", "copies")) else ():
        if value >= size and value % size == 0:
            return f"{value // size:,} {unit}"
    return f"{value:,}"


def gpu_pages() -> dict[str, str]:
    """Return the page of the devices, and the plot of each."""
    from benchmarks.gpu import report

    results = report.kept_results(ROOT / "benchmarks" / "results")
    plots = {report.plot_name(result): report.plot(result) or "" for result in results}
    return {"gpu.md": report.page(results), **{name: made for name, made in plots.items() if made}}


def main() -> int:
    """Write the pages, or compare them on --check."""
    commands_page = page()
    # Beside this file; the package must be found first.
    import faces
    import kinds

    from tests.everyday import page as everyday
    from tests.model_pairs import harness as model_pairs
    from tests.model_pairs import peers, twins

    old = []
    pages = {
        "cli.md": commands_page,
        "kinds.md": kinds.page(),
        "limits.md": limits_page(),
        "api.md": faces.page(),
        **gpu_pages(),
        "everyday.md": everyday.page(),
        "model_pairs.md": "\n".join(filter(None, (model_pairs.page(), twins.page(), peers.page()))),
    }
    for name, made in pages.items():
        file = DOCS / name
        if sys.argv[1:] != ["--check"]:
            file.write_text(made, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != made:
            old.append(file)
    for file in sorted(set(DOCS.glob("gpu-*.svg")) - {DOCS / name for name in pages}):
        if sys.argv[1:] == ["--check"]:
            old.append(file)
        else:
            file.unlink()
    for file in old:
        sys.stderr.write(f"{file.relative_to(ROOT)} is out of date: python docs/generate.py\n")
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
