"""The documents: their code runs, their links lead somewhere, their references name all that there is."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from ckpttool.core import errors
from docs.blocks import DOCS, ROOT, RUN, Block, blocks, differs
from docs.screens import Folder, screens
from tests import warm
from tests.conftest import in_framework, in_process

PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
LINKED = sorted({*PAGES, *ROOT.glob("*.md"), ROOT / "examples" / "README.md"})
SAMPLE = str(ROOT / "sample_ckpts" / "td3_pendulum_tf" / "ckpt-15000")

DATA = ("text", "json", "toml", "yaml")
TIMEOUT_S = 300
MARKS = {
    "torch": pytest.mark.torch,
    "tensorflow": pytest.mark.tensorflow,
    "gymnasium": pytest.mark.environment,
}
# They take seconds to import: a program that imports one is begun after that.
IMPORTED = re.compile(r"^(?:import|from) (keras|tensorflow|torch)\b", re.MULTILINE)
# A command that computes by TensorFlow, which must not meet PyTorch in one process.
TENSORFLOW = "--backend tensorflow"


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


class Quick(Folder):
    """The folder of a page, whose programs start in processes that have imported what takes long."""

    def started(self, block: Block) -> tuple[int, str]:
        # Keras computes by TensorFlow here. What imports neither needs NumPy, which both have imported.
        imported = {name.replace("keras", "tensorflow") for name in IMPORTED.findall(block.text)} or {"torch"}
        if block.tag == "python" and len(imported) == 1:
            return warm.run(imported.pop(), block.text, self.path, self.env)
        return super().started(block)

    def one(self, command: list[str]) -> tuple[int, str]:
        # A package that the page has installed is found by the processes of its folder alone.
        if self.has_plugins or "--ray" in command:
            return super().one(command)
        if TENSORFLOW in " ".join(command):
            ran = in_framework("tensorflow", *command[1:], cwd=self.path)
        else:
            ran = in_process(*command[1:], cwd=self.path)
        return ran.status, ran.out + ran.err


def test_every_block_says_what_it_is() -> None:
    for block in (block for page in PAGES for block in blocks(page)):
        assert block.tag in (*RUN, *DATA), f"{block.location} is tagged {block.tag!r}"
        assert str(ROOT) not in block.text, f"{block.location} names the folder in which it was made"
        assert block.tag != "json" or json.loads(block.text) is not None
        assert block.tag != "toml" or tomllib.loads(block.text)
        assert block.notes.get("not run", "a reason").strip()
        if block.tag == "sh" and block.runs:
            assert "pip install" not in block.text, f"{block.location} would install something"


def test_readers_see_the_name_of_a_file_above_its_block() -> None:
    for page in PAGES:
        lines = page.read_text(encoding="utf-8").splitlines()
        for block in blocks(page):
            if (name := block.notes.get("file")) is not None:
                near = lines[max(0, block.line - 8) : block.line - 1]
                above = " ".join(line for line in near if "<!--" not in line)
                assert f"`{name}`" in above, f"{block.location} does not name {name}"


def marked(page: Path) -> Any:
    required = {module for block in blocks(page) for module in block.notes.get("needs", "").split()}
    marks = [mark for module, mark in MARKS.items() if module in required]
    return pytest.param(page, marks=marks, id=named(page))


@pytest.mark.parametrize("page", [marked(p) for p in PAGES if any(b.runs for b in blocks(p))])
def test_the_blocks_run(page: Path, tmp_path: Path, shared_workers: None) -> None:
    absent = []
    for block, printed in screens(page, Quick(tmp_path)):
        absent += block.missing()
        if block.tag == "text" and printed is not None:
            assert not (stale := differs(block, printed)), f"{stale}: python -m docs.screens\n{printed}"
    if absent:
        pytest.skip(f"not installed: {', '.join(dict.fromkeys(absent))}; all other blocks passed")


def slug(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


@functools.cache
def anchors(page: Path) -> set[str]:
    return {
        slug(line.lstrip("#")) for line in page.read_text(encoding="utf-8").splitlines() if line[:1] == "#"
    }


def links(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"\]\(([^)\s]+)\)", text)


def test_every_relative_link_leads_somewhere() -> None:
    for page, target in [(source, target) for source in LINKED for target in links(source)]:
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        target_page = (page.parent / file).resolve() if file else page
        assert target_page.exists(), f"{named(page)} links to {target}"
        assert not anchor or anchor in anchors(target_page), f"{named(page)} links to {target}"


def test_every_page_can_be_reached_from_the_index() -> None:
    visited, waiting = set(), [DOCS / "index.md"]
    while waiting:
        page = waiting.pop()
        if page not in visited and page.suffix == ".md":
            visited.add(page)
            links = re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8"))
            waiting += [(page.parent / link).resolve() for link in links if "://" not in link]
    assert set(DOCS.rglob("*.md")) <= visited


def generate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DOCS / "generate.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_the_command_reference_is_up_to_date() -> None:
    pinned = re.search(r"^typer==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    installed = importlib.metadata.version("typer")
    if pinned is None or pinned[1] != installed:
        pytest.skip(f"typer {installed} words its help in another way than the version in constraints.txt")
    done = generate("--check")
    assert done.returncode == 0, done.stderr


def test_every_command_is_explained() -> None:
    from ckpttool.cli.app import COMMANDS

    text = "".join(p.read_text(encoding="utf-8") for p in PAGES if p.name != "cli.md")
    for command in COMMANDS:
        assert f"ckpttool {command.name}" in text


def test_every_kind_of_error_is_explained() -> None:
    stated = (DOCS / "json.md").read_text(encoding="utf-8")
    kinds = [k.kind for k in vars(errors).values() if isinstance(k, type) and issubclass(k, Exception)]
    assert not [kind for kind in kinds if f"`{kind}`" not in stated]


PATH = re.compile(
    r"`(?:ckpttool/)?((?:core|encodings|formats|mapping|libraries|networks|evaluation|commands)/\w+\.py)`"
)
NOUN = re.compile(r"^\| [A-Z][\w, ]+ \| (`\w+`(?:, `\w+`)*) \| `(\w+/\w+\.py)` \|", re.MULTILINE)


def test_every_file_that_a_page_names_is_there() -> None:
    wrong = {
        f"{named(page)}: {file}"
        for page in PAGES
        for file in PATH.findall(page.read_text(encoding="utf-8"))
        if not (ROOT / "ckpttool" / file).is_file() and "NAME" not in file
    }
    assert wrong == set()


def test_every_noun_of_the_architecture_is_a_class_of_its_file() -> None:
    rows = NOUN.findall((DOCS / "architecture.md").read_text(encoding="utf-8"))
    assert len(rows) == 11
    for classes, file in rows:
        text = (ROOT / "ckpttool" / file).read_text(encoding="utf-8")
        for name in re.findall(r"\w+", classes):
            assert re.search(rf"^class {name}\b", text, re.MULTILINE), f"{file} has no class {name}"
