"""`report --verification`: outputs and layers of a verification on the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckpttool.core import FormatError
from ckpttool.pages.checkpoint_page import VerificationSection, read_verification
from tests import schemas
from tests.conftest import TORCH_SAMPLE, in_process, refused
from tests.report_pages import Page

HOSTILE = "</td><script>document.title='owned'</script>\x1b[31m"


def layer(number: int, *, within: bool = True, name: str = "layer") -> dict[str, Any]:
    error = 1e-16 if within else 3e-3
    kinds = {"class_a": "Linear", "class_b": "Dense", "by": "weights"}
    pair = {"a": f"{name}.{number}", "b": f"{name}/{number}"}
    return {**pair, **kinds, "inputs": 1e-16, "outputs": error, "within": within}


def document(count: int, wrong: int | None, **first: Any) -> dict[str, Any]:
    """Return the output of verify for a model of `count` layers that differs from layer `wrong` on."""
    layers = [layer(number, within=wrong is None or number < wrong) for number in range(count)]
    errors = {"max_abs": 1e-7, "max_rel": 1e-7, "error_a": 1e-7, "error_b": 1e-7}
    divergence = None
    if wrong is not None:
        facts = {"where": "layer", "inputs": 1e-16, "cause": "epsilon is 1e-05 in A", "confirmed": True}
        more = {"fix": "set eps=1e-05", "after": None, **first}
        divergence = {"a": layers[wrong]["a"], "b": layers[wrong]["b"], **facts, **more}
    models = {"inputs": [], "float64": True, "layers": layers, "first_difference": divergence}
    return {
        "schema": 1,
        "tool": "ckpttool 0",
        "a": "model.keras",
        "b": str(TORCH_SAMPLE),
        "backends": ["keras", "torch"],
        "networks": [{"name": "output", "n": 8, **errors, "within": wrong is None}],
        "tolerance": "rounding",
        "within": wrong is None,
        "models": {"engines": ["keras 3", "torch 2"], **models},
        "not_compared": [],
        "assumed": [],
        "ledger": [],
        "notes": [],
    }


def read(tmp_path: Path, result: Any, path: str = str(TORCH_SAMPLE)) -> VerificationSection:
    file = tmp_path / "verification.json"
    file.write_text(json.dumps(result), encoding="utf-8")
    return read_verification(str(file), path)


def test_the_documents_of_these_tests_are_those_of_verify() -> None:
    schemas.require("verify", document(3, 1))
    schemas.require("verify", document(3, None))


def test_the_first_difference_is_marked(tmp_path: Path) -> None:
    section = read(tmp_path, document(6, 4))
    assert not section.within
    assert section.belongs
    assert [row.first for row in section.layers] == [False] * 4 + [True, False]
    assert [row.within for row in section.layers] == [True] * 4 + [False] * 2
    assert section.layers[0].bar < 0.1 < 0.8 < section.layers[4].bar < 1
    assert section.layers[0].classes == "Linear / Dense"
    assert section.first is not None
    assert section.first.heading == "Cause"
    assert not section.every


def test_a_difference_between_layers_names_both(tmp_path: Path) -> None:
    record = document(6, 4, where="between", confirmed=False, after="layer.3")
    difference = read(tmp_path, record).first
    assert difference is not None
    assert difference.heading == "Suspected cause"
    assert "layer.3" in difference.where
    assert "layer/4" in difference.where


@pytest.mark.parametrize(("wrong", "shown"), [(100, range(88, 108)), (3, range(11)), (None, range(188, 200))])
def test_a_long_table_shows_what_is_next_to_the_difference(
    tmp_path: Path, wrong: int | None, shown: range
) -> None:
    section = read(tmp_path, document(200, wrong))
    assert [row.number - 1 for row in section.layers] == [*shown]
    assert len(section.every) == 200
    assert section.more == 0


def test_rows_beyond_the_limit_are_counted(tmp_path: Path) -> None:
    section = read(tmp_path, document(2100, None))
    assert (len(section.every), section.more) == (2000, 100)


def test_another_checkpoints_verification_is_marked(tmp_path: Path) -> None:
    assert not read(tmp_path, document(2, None), "other.pt").belongs


@pytest.mark.parametrize("value", ["NaN", "Infinity", None, "text", True, [], 0, 10**400])
def test_errors_may_be_anything(tmp_path: Path, value: Any) -> None:
    record = document(3, 1)
    record["models"]["layers"][1]["outputs"] = value
    row = read(tmp_path, record).layers[1]
    assert row.bar == (0.0 if value == 0 and value is not True else 1.0)
    assert row.outputs


@pytest.mark.parametrize("broken", [{}, {"networks": []}, {"networks": {}, "a": "x", "b": "y"}])
def test_other_documents_are_refused(tmp_path: Path, broken: Any) -> None:
    with pytest.raises(FormatError) as error:
        read(tmp_path, broken)
    assert error.value.file is not None


@pytest.mark.parametrize("models", [None, [], {"layers": 3, "first_difference": []}, {"layers": [1, None]}])
def test_damaged_parts_are_left_out(tmp_path: Path, models: Any) -> None:
    section = read(tmp_path, {**document(2, 1), "models": models})
    assert section.first is None


def test_the_page_has_the_table(tmp_path: Path) -> None:
    record = document(3, 1, cause=HOSTILE)
    record["assumed"] = [HOSTILE]
    record["models"]["layers"][0]["a"] = HOSTILE
    file = tmp_path / "verification.json"
    file.write_text(json.dumps(record), encoding="utf-8")
    ran = in_process("report", TORCH_SAMPLE, "--verification", file, "--out", tmp_path / "page.html")
    assert ran.status == 0, ran.err
    page = Page.of(tmp_path / "page.html")
    assert ("section", "verification") in {(tag, attributes.get("id")) for tag, attributes in page.elements}
    assert sum(attributes.get("class") == "parts" for _, attributes in page.elements) == 1
    shown = "".join(page.text)
    assert "\x1b" not in shown
    assert all("owned" not in script for script in page.scripts)
    # Every table is in a region that the keyboard can scroll, with a name.
    regions = [attributes for tag, attributes in page.elements if attributes.get("role") == "region"]
    assert all(region.get("aria-label") and region.get("tabindex") == "0" for region in regions)


def test_a_file_that_is_no_verification_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "verification.json"
    file.write_text("{}", encoding="utf-8")
    target = tmp_path / "page.html"
    refused(in_process("report", TORCH_SAMPLE, "--verification", file, "--out", target))
    assert not target.exists()


def test_the_page_of_a_run_has_no_verification(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    run = TORCH_SAMPLE.parent
    refused(in_process("report", run, "--verification", tmp_path / "any.json", "--out", target))
    assert not target.exists()
