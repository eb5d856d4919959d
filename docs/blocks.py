"""Fenced blocks of a page, and the comparison of expected output (a `text` block) with actual output."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

RUN = ("sh", "python")
# Comments before a block; without one the block runs and must exit with status 0 (see Block).
NOTE = re.compile(r"<!-- (not run|needs|exits|file|varies): (.+?) -->")
FENCE = re.compile(r"```(\S*)\s*")
CUT = "..."
FEW = 2
# Speeds, rounding and versions differ between machines; whole numbers and digests do not.
FRACTION = re.compile(
    r"-?\b\d[\d,]*\.\d+(\.\d+)*(e[-+]?\d+)?|-?\b\d+e[-+]\d+\b"
    r"|\b\d[\d,]*(?= steps/s)|\d{4}-\d\d-\d\d \d\d:\d\d"
)
NUMBER = re.compile(r"[0-9a-f]{64}|-?\d[\d,]*(\.\d+)?(e[-+]?\d+)?")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block: line number, tag, text, and the comments directly before it.

    `not run: REASON` excludes it, `needs: MODULE ...` skips it without these modules, `exits: STATUS` is the
    expected exit status, `file: NAME` writes it to a file of the page's folder instead. `varies: REASON`
    marks output whose whole numbers change between runs.
    """

    page: Path
    line: int
    tag: str
    text: str
    notes: dict[str, str]

    @property
    def location(self) -> str:
        """File and line of the block."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether the block is run."""
        return self.tag in RUN and not self.notes.keys() & {"not run", "file"}

    def missing(self) -> list[str]:
        """Return the required modules that are not installed."""
        required = self.notes.get("needs", "").split()
        return [module for module in required if importlib.util.find_spec(module) is None]


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page; a block without an end is a ValueError."""
    blocks: list[Block] = []
    notes: dict[str, str] = {}
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), start=1)
    for number, line in lines:
        fence, note = FENCE.fullmatch(line), NOTE.fullmatch(line.strip())
        if fence is not None:
            blocks.append(Block(page, number, fence[1], _body(lines, f"{page}:{number}"), notes))
            notes = {}
        elif note is not None:
            notes = {**notes, note[1]: note[2]}
        elif line.strip():
            notes = {}
    return blocks


def _body(lines: Iterator[tuple[int, str]], location: str) -> str:
    body = []
    for _, line in lines:
        if line.rstrip() == "```":
            return "".join(f"{line}\n" for line in body)
        body.append(line)
    raise ValueError(f"{location}: the block has no end")


def differs(block: Block, printed: str) -> str:
    """Describe the first difference between expected and actual output; "" if there is none.

    `...` stands for any lines. All other lines must match in order and without gaps.
    """
    numbers = varying(block)
    shown = [_masked(line, numbers) for line in block.text.splitlines()]
    expected = [_masked(line, numbers) for line in fitted(block.text, printed, numbers).splitlines()]
    if shown == expected:
        return ""
    pairs = zip([*shown, ""], [*expected, ""], strict=False)
    old, new = next(pair for pair in pairs if pair[0] != pair[1])
    return f"{block.location}: expected {old!r}, printed {new!r}"


def varying(block: Block) -> re.Pattern[str]:
    """Return the pattern of numbers that may differ between runs."""
    return NUMBER if "varies" in block.notes else FRACTION


def fitted(shown: str, printed: str, numbers: re.Pattern[str] | None = None) -> str:
    """Return the updated output: the lines of `shown` as printed now, and `...` between them.

    Lines are matched without their numbers. A line does not change if only numbers that match `numbers`
    differ. Lines without a match are replaced by everything printed in their place.
    """
    lines = [line.rstrip() for line in printed.strip("\n").splitlines()]
    if not shown.strip():
        return _joined(lines)
    masks = [_masked(line, NUMBER) for line in lines]
    built: list[str] = []
    at, cut, lost = 0, False, False
    for line in filter(str.strip, shown.splitlines()):
        if line.strip() == CUT:
            cut = True
        elif (mask := _masked(line, NUMBER)) in masks[at:]:
            here = masks.index(mask, at)
            built += _between(lines[at:here], cut=cut, lost=lost)
            same = numbers is not None and _masked(line, numbers) == _masked(lines[here], numbers)
            built.append(line.rstrip() if same else lines[here])
            at, cut, lost = here + 1, False, False
        else:
            lost = True
    built += _between(lines[at:], cut=cut, lost=lost)
    return _joined(built)


def _between(lines: list[str], *, cut: bool, lost: bool) -> list[str]:
    """Return the replacement of omitted lines: the lines themselves if they are few or replace lost ones."""
    count = sum(map(bool, lines))
    return [CUT] if count and (cut or (count > FEW and not lost)) else lines


def _joined(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _masked(line: str, numbers: re.Pattern[str]) -> str:
    # Column widths depend on the numbers in them.
    return re.sub(r"\s+", " ", numbers.sub("#", line)).strip()
