"""The golden texts belong to tests that exist, and the comparison can fail."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ckpttool.core import FormatError
from tests import golden_texts


@pytest.mark.parametrize("file", sorted(golden_texts.FOLDER.glob("*.txt")), ids=lambda file: file.stem)
def test_every_section_belongs_to_a_test(file: Path) -> None:
    module = Path(__file__).parent / f"test_{file.stem}.py"
    tree = ast.parse(module.read_text(encoding="utf-8"))
    tests = {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}
    named = {section.rpartition(" ")[0].partition("[")[0] for section in golden_texts.read(file)}
    assert named
    assert named <= tests


def test_a_changed_text_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden_texts, "FOLDER", tmp_path)
    (tmp_path / "README.md").touch()
    error = FormatError("the file ends early", file="/x/a.pt", expected="40 bytes", hint="copy it again")

    def recorder(*, update: bool) -> golden_texts.Golden:
        return golden_texts.Golden("tests.test_x", "test_y", replaced={"/x/": "TMP/"}, update=update)

    with pytest.raises(AssertionError, match="no section"):
        recorder(update=False)(error)
    writing = recorder(update=True)
    writing(error)
    writing("a table\n\n  with rows   \n")
    reading = recorder(update=False)
    reading(error)
    reading("a table\n\n  with rows\n")
    assert golden_texts.read(tmp_path / "x.txt") == {
        "test_y 1": "format: TMP/a.pt: the file ends early (expected 40 bytes)\nhint: copy it again",
        "test_y 2": "a table\n\n  with rows",
    }
    with pytest.raises(AssertionError):
        recorder(update=False)("another text")
