"""Every crafted file: the verdict beside it, and nothing done to the machine (tests/hostile/case.py)."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import golden_texts, hostile
from tests.golden_texts import Golden
from tests.hostile.case import Case, examine


def crafted() -> list[Case]:
    """Return the cases of all modules that craft files."""
    names = [found.name for found in pkgutil.iter_modules(hostile.__path__)]
    homes = [importlib.import_module(f"tests.hostile.{name}") for name in sorted(names) if "crafted" in name]
    return [case for home in homes for case in home.CASES]


CASES = crafted()
TEXTS = golden_texts.read(golden_texts.FOLDER / "hostile.txt")


def kind(case: Case) -> tuple[object, ...]:
    """Return what tells kinds of cases apart: the format, the statuses, and the words of the verdict."""
    section = f"test_a_crafted_file_gets_its_verdict_and_nothing_more[{case.name}] 1"
    # Without numbers, names, places and hints.
    words = re.sub(r"'[^']*'| \(.*\)|\S*[\d/_\[\].]\S*|\nhint:.*", "#", TEXTS.get(section, case.name))
    statuses = (case.inspect, case.digest, case.convert, case.strict, case.eval)
    return case.name.partition("-")[0], case.options != (), case.shows != "", statuses, words


def marked() -> Iterator[Any]:
    """Yield the cases; those of a kind that an earlier one has are `slow`."""
    found = set()
    for case in CASES:
        marks = [pytest.mark.slow] * (kind(case) in found)
        found.add(kind(case))
        yield pytest.param(case, id=case.name, marks=marks)


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", list(marked()))
def test_a_crafted_file_gets_its_verdict_and_nothing_more(case: Case, tmp_path: Path, golden: Golden) -> None:
    faults, shown = examine(case, tmp_path)
    if shown:
        golden(shown)
    assert faults == []
