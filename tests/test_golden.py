"""The golden texts belong to tests that exist, and the comparison can fail."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckpttool.core import FormatError
from tests import golden_texts


def test_every_section_belongs_to_a_test() -> None:
    files = sorted(golden_texts.FOLDER.glob("*.txt"))
    assert len(files) > 100
    for file in files:
        module = Path(__file__).parent / f"test_{file.stem}.py"
        tests = set(re.findall(r"^ *def (test_\w+)\(", module.read_text(encoding="utf-8"), re.MULTILINE))
        sections = golden_texts.SECTION.findall(file.read_text(encoding="utf-8"))
        named = {name.rpartition(" ")[0].partition("[")[0] for name, _ in sections}
        assert named, file
        assert named <= tests, file


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
