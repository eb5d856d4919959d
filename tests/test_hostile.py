"""Every crafted file: the verdict beside it, and nothing done to the machine (tests/hostile/case.py)."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest

from tests import hostile
from tests.golden_texts import Golden
from tests.hostile.case import Case, examine


def crafted() -> list[Case]:
    """Return the cases of all modules that craft files."""
    names = [found.name for found in pkgutil.iter_modules(hostile.__path__)]
    homes = [importlib.import_module(f"tests.hostile.{name}") for name in sorted(names) if "crafted" in name]
    return [case for home in homes for case in home.CASES]


CASES = crafted()


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_crafted_file_gets_its_verdict_and_nothing_more(case: Case, tmp_path: Path, golden: Golden) -> None:
    faults, shown = examine(case, tmp_path)
    if shown:
        golden(shown)
    assert faults == []
