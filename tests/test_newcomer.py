"""The toys of docs/architecture.md: the tests of that page pass, and its rows are those of the tables."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpttool.cli.app import CommandEntry
from ckpttool.conversion.targets import TargetKind
from ckpttool.core import FormatError, Plugin, plugins
from ckpttool.core.plugins import FormatSignature
from ckpttool.formats import open_checkpoint
from docs.blocks import DOCS, blocks
from docs.screens import Folder
from tests.conftest import ROOT
from tests.conftest import ckpttool as run

PAGE = DOCS / "architecture.md"
TOYS = ["crate", "toylab", "einsum"]


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Install the page's files as a package of somebody else."""
    folder = Folder(tmp_path_factory.mktemp("toys"))
    for block in blocks(PAGE):
        if "file" in block.notes:
            folder.write(block)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder.path)
        yield folder.path
    for name in (*TOYS, "test_toys"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def environment(toys: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{ROOT}:{toys}"}


def pytest_run(toys: Path, environment: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    """Run pytest as the author of a plug-in does, outside this project's settings."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--strict-markers", *options]
    return subprocess.run(  # this interpreter
        command, cwd=toys, env={**os.environ, **environment, "COLUMNS": "400"}, capture_output=True, text=True
    )


def test_the_tests_of_the_page_pass(toys: Path, environment: dict[str, str]) -> None:
    done = pytest_run(toys, environment, "-m", "not slow", "test_toys.py")
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 85
    assert "warning" not in done.stdout


UNFINISHED = """
import types
import crate
from ckpttool.testing import BackendContract, FormatContract, LayoutContract, WritingContract, build_tree

class TestBackendOfNoPackage(BackendContract):
    module = types.SimpleNamespace(NAME="lost")

class TestFormatOfNoPackage(FormatContract):
    module = types.SimpleNamespace(NAME="lost")

class TestLayoutOfNoPackage(LayoutContract):
    name = "lost"

class TestNoBackend(BackendContract): ...

class TestNoFile(FormatContract):
    module = crate

class TestNoTree(LayoutContract):
    name = "toylab"

class TestFewTensors(WritingContract):
    module = crate

    def make(self, folder):
        return self.put(build_tree({"value": 3}), folder / "one")
"""


def test_an_unfinished_contract_says_what_it_lacks(toys: Path, environment: dict[str, str]) -> None:
    (toys / "test_unfinished.py").write_text(UNFINISHED, encoding="utf-8")
    laws = "test_it_is_registered or test_the_record_is_whole or test_every_leaf_has_a_way"
    done = pytest_run(toys, environment, "test_unfinished.py", "-k", laws, "-rfE")
    errors = {
        name: "".join(re.findall(rf"(?m)^(?:FAILED|ERROR) test_unfinished.py::{name}::(.*)$", done.stdout))
        for name in re.findall(r"class (Test\w+)", UNFINISHED)
    }
    expected = {
        "TestBackendOfNoPackage": "ckpttool.backends",
        "TestFormatOfNoPackage": "ckpttool.formats",
        "TestLayoutOfNoPackage": "ckpttool.layouts",
        "TestNoBackend": "define module",
        "TestNoFile": "define make",
        "TestNoTree": "define the fixture tree",
        # pytest shows the values of the assertion.
        "TestFewTensors": "assert 1 > 5",
    }
    assert {name for name, part in expected.items() if part not in errors[name]} == set(), done.stdout


@pytest.mark.parametrize("text", ["{}", "[]", '{"tensors": {}, "tree": 3}', '{"tensors": {}, "tree": "{}"}'])
def test_the_format_of_the_page_refuses_a_crafted_index(
    toys: Path, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the file, also where a helper that does not know it raised the error."""
    monkeypatch.setitem(plugins.BUILT_IN, "formats", (Plugin("crate", "crate"),))
    crate, index = importlib.import_module("crate"), text.encode()
    file = tmp_path / "bad.crate"
    file.write_bytes(crate.MAGIC + index + crate.END.pack(zlib.crc32(index), len(index)))
    with pytest.raises(FormatError) as caught:
        open_checkpoint(str(file))
    assert caught.value.file == str(file)


def test_the_package_installs_the_modules_that_it_registers(toys: Path) -> None:
    package = tomllib.loads((toys / "pyproject.toml").read_text(encoding="utf-8"))
    registered = [
        module for group in package["project"]["entry-points"].values() for module in group.values()
    ]
    assert package["tool"]["setuptools"]["py-modules"] == registered == TOYS


def test_the_rows_of_the_page_are_rows() -> None:
    names = {row.__name__: row for row in (CommandEntry, FormatSignature, Plugin, TargetKind)}
    quoted = re.findall(
        r"`[^`]*?((?:Plugin|CommandEntry|TargetKind|FormatSignature)\(.+\))`",
        PAGE.read_text(encoding="utf-8"),
    )
    rows = [eval(text, dict(names)) for text in quoted]  # the project's own page
    assert {type(row) for row in rows} == {CommandEntry, Plugin, TargetKind}
    for row in rows:
        if isinstance(row, CommandEntry):
            assert importlib.util.find_spec(row.target.partition(":")[0])
        elif isinstance(row, Plugin):
            assert importlib.util.find_spec(row.module.rpartition(".")[0])


def test_the_command_line_lists_and_uses_them(
    tmp_path: Path, toys: Path, environment: dict[str, str]
) -> None:
    test_toys, testing = importlib.import_module("test_toys"), importlib.import_module("ckpttool.testing")
    agent = testing.build_tree({**test_toys.trained("brain", 3, 2), **test_toys.trained("judge", 5, 1)})
    with open(tmp_path / "agent.crate", "wb") as stream:
        importlib.import_module("crate").pieces(agent)[0].write(stream)
    record = run("inspect", tmp_path / "agent.crate", "--json", env=environment).json()
    assert (record["format"], record["layout"]) == ("crate", "toylab")
    copy = tmp_path / "copy.crate"
    assert run("convert", tmp_path / "agent.crate", copy, "--to", "crate", env=environment).status == 0
    assert run("inspect", copy, "--json", env=environment).json()["format"] == "crate"
    for command, toy in (("formats", "crate"), ("layouts", "toylab"), ("backends", "einsum")):
        rows = run(command, "--json", env=environment).json()[command]
        assert toy in [row["name"] for row in rows]
