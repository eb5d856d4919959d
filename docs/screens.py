"""Run the code blocks of pages and update the `text` blocks below them: `python -m docs.screens [PAGE ...]`.

Without pages, update all. Output that is up to date (see docs/blocks.py) is unchanged, except with --fresh.
"""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs.blocks import DOCS, ROOT, Block, blocks, differs, fitted, varying

TIMEOUT_S = 300
# Commands without shell syntax.
PLAIN = re.compile(r"(ckpttool (?:'[^']*'|[\w ./:,@%+-])+?)(?: \|\| test \$\? = (\d))?")


class Folder:
    """The working folder of one page: the samples, and the programs `ckpttool` and `python` on the PATH."""

    def __init__(self, path: Path) -> None:
        self.path = path / "work"
        self.has_plugins = False
        self.path.mkdir()
        shutil.copytree(ROOT / "sample_ckpts", self.path / "sample_ckpts")
        programs = path / "bin"
        programs.mkdir()
        for name, arguments in (("ckpttool", "-m ckpttool"), ("python", "")):
            program = programs / name
            program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n', encoding="utf-8")
            program.chmod(0o755)
        self.env = {
            **os.environ,
            "PATH": os.pathsep.join((str(programs), os.environ["PATH"])),
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(self.path))),
            "COLUMNS": "80",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }

    def write(self, block: Block) -> None:
        """Write a `file` block; install the package of a pyproject.toml."""
        target = self.path / block.notes["file"]
        target.write_text(block.text, encoding="utf-8")
        if target.name == "pyproject.toml":
            self.has_plugins = True
            self._install(tomllib.loads(block.text)["project"])

    def _install(self, project: dict[str, Any]) -> None:
        # The metadata that pip would write: name, version and entry points.
        metadata = self.path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        metadata.mkdir()
        fields = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        (metadata / "METADATA").write_text(fields, encoding="utf-8")
        points = configparser.ConfigParser()
        points.read_dict(project["entry-points"])
        with open(metadata / "entry_points.txt", "w", encoding="utf-8") as file:
            points.write(file)

    def run(self, block: Block) -> str:
        """Run a block and return its output; raise AssertionError for an unexpected exit status."""
        status, output = self.started(block)
        if status != int(block.notes.get("exits", "0")):
            raise AssertionError(f"{block.location} ended with {status}:\n{output}")
        return output

    def started(self, block: Block) -> tuple[int, str]:
        """Run a block; return the exit status and the output."""
        lines = block.text.splitlines()
        plain = [match for line in lines if (match := PLAIN.fullmatch(line)) is not None]
        if block.tag == "sh" and len(plain) == len(lines):
            return self.commanded([(match[1], int(match[2] or 0)) for match in plain])
        command = ["sh", "-euc", block.text] if block.tag == "sh" else [sys.executable, "-c", block.text]
        return self.process(command, subprocess.STDOUT)

    def commanded(self, commands: list[tuple[str, int]]) -> tuple[int, str]:
        """Run commands like `sh -e`, until one exits with an unexpected status.

        The output of each is its stdout followed by its stderr.
        """
        output = ""
        for command, expected in commands:
            status, printed = self.one(shlex.split(command))
            output += printed
            if status not in (0, expected):
                return status, output
        return 0, output

    def one(self, command: list[str]) -> tuple[int, str]:
        """Run one command of ckpttool."""
        return self.process([sys.executable, "-m", "ckpttool", *command[1:]], subprocess.PIPE)

    def process(self, command: list[str], stderr: int) -> tuple[int, str]:
        """Run a process in this folder."""
        done = subprocess.run(  # noqa: S603  # the pages' own programs
            command,
            cwd=self.path,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            timeout=TIMEOUT_S,
            check=False,
        )
        return done.returncode, (done.stdout + (done.stderr or b"")).decode()


def screens(page: Path, folder: Folder) -> Iterator[tuple[Block, str | None]]:
    """Run a page; yield every executed block and every `text` block with the printed output.

    The output is None if a required module is not installed.
    """
    output: str | None = None
    for block in blocks(page):
        if "file" in block.notes:
            folder.write(block)
        elif block.runs:
            output = None if block.missing() else folder.run(block)
            yield block, output
            continue
        elif block.tag == "text" and output is not None:
            yield block, output
        output = None


def refresh(page: Path, *, fresh: bool) -> int:
    """Update the `text` blocks of a page; return how many changed."""
    before = page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as path:
        ran = list(screens(page, Folder(Path(path))))
    if page.read_text(encoding="utf-8") != before:
        sys.stderr.write(f"{page} was edited meanwhile and is not updated\n")
        return 0
    lines = before.splitlines()
    changed = 0
    for block, printed in reversed(ran):
        if block.tag == "text" and printed is not None and (fresh or differs(block, printed)):
            built = fitted(block.text, printed, None if fresh else varying(block)).splitlines()
            lines[block.line : block.line + len(block.text.splitlines())] = built
            changed += 1
    if changed:
        page.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return changed


def main() -> int:
    """Update all pages, or those given; return 1 if a program fails."""
    named = [Path(name).resolve() for name in sys.argv[1:] if name != "--fresh"]
    failed = 0
    for page in named or sorted([ROOT / "README.md", *DOCS.rglob("*.md")]):
        try:
            changed = refresh(page, fresh="--fresh" in sys.argv)
        except AssertionError as stopped:
            failed = 1
            sys.stderr.write(f"{stopped}\n")
            continue
        sys.stderr.write(f"{page.relative_to(ROOT)}: {changed} screens changed\n" if changed else "")
    return failed


if __name__ == "__main__":
    sys.exit(main())
