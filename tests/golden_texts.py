"""Texts that people see, kept in tests/golden: the tests compare with them and quote no sentence themselves.

`make golden` runs the tests that use them and writes what they got; the change is reviewed as text. A
section is named after the test, with a number for each text of it:

    == test_refuses[cut] 1
        truncated: agent.pt: the file ends early (expected 40 bytes, found 12)
        hint: copy the file again
"""

from __future__ import annotations

import fcntl
import functools
import re
from pathlib import Path

from ckpttool.core import CkpttoolError
from tests.conftest import Ran

FOLDER = Path(__file__).parent / "golden"
SECTION = re.compile(r"^== (.+)\n((?:    .*\n|\n)*)", re.MULTILINE)


class Golden:
    """Compares texts with the file of a test module, or writes them with `--golden`."""

    def __init__(self, module: str, test: str, *, replaced: dict[str, str], update: bool) -> None:
        """Take the module's and the test's names, and the parts of a text that differ between machines."""
        self.file = FOLDER / f"{module.rpartition('.')[2].removeprefix('test_')}.txt"
        self._test, self._replaced, self._update = test, replaced, update
        self._count = 0

    def replace(self, part: str, name: str) -> None:
        """Store `name` instead of a part that differs between runs, e.g. a server's address."""
        self._replaced[part] = name

    def __call__(self, shown: str | CkpttoolError | Ran) -> None:
        """Compare an error (its kind, sentence and hint), a finished command, or a text."""
        text = render(shown)
        for old, new in self._replaced.items():
            text = text.replace(old, new)
        self._count += 1
        section = f"{self._test} {self._count}"
        if self._update:
            _write(self.file, section, text)
            return  # another process may be writing the file
        changed = self.file.stat().st_mtime_ns if self.file.is_file() else 0
        expected = _read_once(self.file, changed).get(section)
        assert expected is not None, f"{self.file.name} has no section {section!r}; run `make golden`"
        assert text == expected


def render(shown: str | CkpttoolError | Ran) -> str:
    """Return an error, a finished command or a text as it is stored: no trailing blanks."""
    if isinstance(shown, CkpttoolError):
        shown = f"{shown.kind}: {shown}" + (f"\nhint: {shown.hint}" if shown.hint else "")
    elif isinstance(shown, Ran):
        shown = f"status {shown.status}\n{shown.out}" + f"\nstderr:\n{shown.err}" * bool(shown.err)
    return "\n".join(line.rstrip() for line in shown.splitlines()).strip("\n")


def read(file: Path) -> dict[str, str]:
    """Return the sections of a file by their names."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return {
        name: "\n".join(line.removeprefix("    ") for line in body.splitlines()).strip("\n")
        for name, body in SECTION.findall(text)
    }


@functools.cache
def _read_once(file: Path, changed: int) -> dict[str, str]:
    """Return what `read` does; each test of a module looks at the file, which is the same from then on."""
    return read(file)


def _write(file: Path, section: str, text: str) -> None:
    with (FOLDER / "README.md").open() as lock:  # several processes of pytest write one file
        fcntl.flock(lock, fcntl.LOCK_EX)
        sections = read(file) | {section: text}
        file.write_text(
            "\n".join(
                f"== {name}\n" + "".join(f"    {line}".rstrip() + "\n" for line in body.splitlines())
                for name, body in sorted(sections.items())
            ),
            encoding="utf-8",
        )
