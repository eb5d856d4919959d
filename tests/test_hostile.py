"""Every crafted file: the verdict beside it, and nothing done to the machine (tests/hostile/case.py)."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import golden_texts, hostile
from tests.golden_texts import Golden
from tests.hostile.case import Case, examine


def crafted() -> list[Case]:
    """Return the cases of all modules that craft files."""
    names = [module.name for module in pkgutil.iter_modules(hostile.__path__)]
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
    kinds = set()
    for case in CASES:
        marks = [pytest.mark.slow] * (kind(case) in kinds)
        kinds.add(kind(case))
        yield pytest.param(case, id=case.name, marks=marks)


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


# Cases that follow each other and share a process, whose start takes longer than the commands on one.
TOGETHER = 12


@pytest.fixture(scope="module")
def outcome(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Case], tuple[list[str], str]]:
    """Give the outcome of a case; those that come after it in this run are examined with it."""
    cases = [item.callspec.params["case"] for item in request.session.items if _is_case(item)]
    outcomes: dict[Case, tuple[list[str], str]] = {}

    def examined(case: Case) -> tuple[list[str], str]:
        if case not in outcomes:
            at = cases.index(case) + 1
            # Limits, of memory for example, are those of a process in which nothing ran before.
            others = [other for other in cases[at : at + TOGETHER] if not other.options and not case.options]
            outcomes.update(examine([case, *others], tmp_path_factory.mktemp("cases")))
        return outcomes[case]

    return examined


def _is_case(item: Any) -> bool:
    return getattr(item, "function", None) is test_a_crafted_file_gets_its_verdict_and_nothing_more


@pytest.mark.parametrize("case", list(marked()))
def test_a_crafted_file_gets_its_verdict_and_nothing_more(
    case: Case, outcome: Callable[[Case], tuple[list[str], str]], golden: Golden
) -> None:
    faults, shown = outcome(case)
    if shown:
        golden(shown)
    assert faults == []
