"""The documents: their code runs, their links lead somewhere, their references name all that there is."""

from __future__ import annotations

import configparser
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from ckpttool import errors
from ckpttool.ops.convert import convert
from ckpttool.ops.digest import digest
from ckpttool.ops.evaluation import Evaluation, Protocol
from ckpttool.ops.listing import listing
from ckpttool.ops.parity import Parity
from ckpttool.ops.summary import summary
from ckpttool.ops.verify import Verification
from ckpttool.sidecar import Sidecar
from tests import warm
from tests.conftest import in_process

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
LINKED = [*PAGES, ROOT / "CHANGELOG.md"]
SAMPLE = str(ROOT / "sample_ckpts" / "td3_pendulum_tf" / "ckpt-15000")

RUN = ("sh", "python")
DATA = ("text", "json", "toml")
TIMEOUT_S = 300
MARKS = {
    "torch": pytest.mark.torch,
    "tensorflow": pytest.mark.tensorflow,
    "gymnasium": pytest.mark.environment,
}
# A block with none of these before it is run, and must end with 0 (see Block).
NOTE = re.compile(r"<!-- (not run|needs|exits|file): (.+?) -->")
FENCE = re.compile(r"```(\S*)\s*")
# They take seconds to import: a program that imports one is begun after that.
IMPORTED = re.compile(r"^(?:import|from) (keras|tensorflow|torch)\b", re.MULTILINE)
# Commands that a shell would pass on word for word; those of TensorFlow must not meet PyTorch in one process.
PLAIN = re.compile(r"ckpttool (?!.*(?:--backend tensorflow|--ray))(?:'[^']*'|[\w ./:,@%+-])+")
NUMBER = re.compile(r"[0-9a-f]{64}|-?\d[\d,]*(\.\d+)?(e[-+]?\d+)?")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block: its first line's number, its tag, its text, and the comments right before it.

    `not run: REASON` leaves it out, `needs: MODULE ...` skips it without these, `exits: STATUS` is the
    status that it must end with, `file: NAME` writes it to a file of the page's folder instead.
    """

    page: Path
    line: int
    tag: str
    text: str
    notes: dict[str, str]

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        return self.tag in RUN and not self.notes.keys() & {"not run", "file"}


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    notes: dict[str, str] = {}
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), start=1)
    for number, line in lines:
        fence = FENCE.fullmatch(line)
        if fence is not None:
            body = []
            for _, inner in lines:
                if inner.rstrip() == "```":
                    break
                body.append(inner)
            else:
                pytest.fail(f"{page}:{number}: the block has no end")
            found.append(Block(page, number, fence[1], "\n".join(body) + "\n", notes))
            notes = {}
        elif NOTE.fullmatch(line.strip()):
            name, said = NOTE.fullmatch(line.strip()).groups()
            notes = {**notes, name: said}
        elif line.strip():
            notes = {}
    return found


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


class Folder:
    """The working folder of one page: the samples, and the programs `ckpttool` and `python` on the PATH."""

    def __init__(self, path: Path) -> None:
        self.path = path / "work"
        self.has_modules = False
        self.path.mkdir()
        shutil.copytree(ROOT / "sample_ckpts", self.path / "sample_ckpts")
        programs = path / "bin"
        programs.mkdir()
        for name, arguments in (("ckpttool", "-m ckpttool"), ("python", "")):
            program = programs / name
            program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n', encoding="utf-8")
            program.chmod(0o755)
        self.env = {
            **os.environ,
            "PATH": os.pathsep.join((str(programs), os.environ["PATH"])),
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(self.path))),
            "COLUMNS": "80",
        }

    def write(self, block: Block) -> None:
        self.has_modules = True
        target = self.path / block.notes["file"]
        target.write_text(block.text, encoding="utf-8")
        if target.name == "pyproject.toml":
            self._install(tomllib.loads(block.text)["project"])

    def _install(self, project: dict[str, Any]) -> None:
        # What pip would leave behind for it: the name, the version and the entry points.
        metadata = self.path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        metadata.mkdir()
        told = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        (metadata / "METADATA").write_text(told, encoding="utf-8")
        points = configparser.ConfigParser()
        points.read_dict(project["entry-points"])
        with open(metadata / "entry_points.txt", "w", encoding="utf-8") as file:
            points.write(file)

    def run(self, block: Block) -> str:
        status, output = self._commanded(block) if self._is_plain(block) else self._begun(block)
        if status != int(block.notes.get("exits", "0")):
            pytest.fail(f"{block.place} ended with {status}:\n{output}", pytrace=False)
        return output

    def _is_plain(self, block: Block) -> bool:
        # A module that the page has written is found by the processes of its folder alone.
        lines = block.text.splitlines()
        return block.tag == "sh" and not self.has_modules and all(map(PLAIN.fullmatch, lines))

    def _commanded(self, block: Block) -> tuple[int, str]:
        """Run commands as `sh -e` does, in this process: until one fails."""
        status, output = 0, ""
        for line in block.text.splitlines():
            ran = in_process(*shlex.split(line)[1:], cwd=self.path)
            status, output = ran.status, output + ran.out + ran.err
            if status:
                break
        return status, output

    def _begun(self, block: Block) -> tuple[int, str]:
        # Keras computes by TensorFlow here.
        imported = {name.replace("keras", "tensorflow") for name in IMPORTED.findall(block.text)}
        if block.tag == "python" and len(imported) == 1:
            return warm.run(imported.pop(), block.text, self.path, self.env)
        command = ["sh", "-euc"] if block.tag == "sh" else [sys.executable, "-c"]
        done = subprocess.run(
            [*command, block.text],
            cwd=self.path,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
            check=False,
        )
        return done.returncode, done.stdout.decode()


def missing(block: Block) -> list[str]:
    wanted = block.notes.get("needs", "").split()
    return [module for module in wanted if importlib.util.find_spec(module) is None]


def masked(line: str) -> str:
    # Speeds, versions and rounding differ between machines, and so do the widths of columns.
    return re.sub(r"\s+", " ", NUMBER.sub("#", line)).strip()


def require_shown(block: Block, output: str) -> None:
    """Assert that every line of a text block is a line of the output, in order; numbers may differ."""
    rest = iter([masked(line) for line in output.splitlines()])
    for line in block.text.splitlines():
        if line.strip() not in ("", "...") and masked(line) not in rest:
            pytest.fail(f"{block.place} shows a line that is not printed: {line!r}\n{output}", pytrace=False)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_block_says_what_it_is(page: Path) -> None:
    for block in blocks(page):
        assert block.tag in (*RUN, *DATA), f"{block.place} is tagged {block.tag!r}"
        assert block.tag != "json" or json.loads(block.text) is not None
        assert block.tag != "toml" or tomllib.loads(block.text)
        assert block.notes.get("not run", "a reason").strip()
        if block.tag == "sh" and block.runs:
            assert "pip install" not in block.text, f"{block.place} would install something"


def marked(page: Path) -> Any:
    wanted = {module for block in blocks(page) for module in block.notes.get("needs", "").split()}
    marks = [mark for module, mark in MARKS.items() if module in wanted]
    return pytest.param(page, marks=marks, id=named(page))


@pytest.mark.parametrize("page", [marked(p) for p in PAGES if any(b.runs for b in blocks(p))])
def test_the_blocks_run(page: Path, tmp_path: Path, shared_workers: None) -> None:
    folder, output, absent = Folder(tmp_path), None, []
    for block in blocks(page):
        if "file" in block.notes:
            folder.write(block)
        elif block.runs and missing(block):
            absent += missing(block)
            output = None
        elif block.runs:
            output = folder.run(block)
        elif block.tag == "text" and output is not None:
            require_shown(block, output)
            output = None
        else:
            output = None
    if absent:
        pytest.skip(f"not installed: {', '.join(dict.fromkeys(absent))}; all other blocks passed")


def slug(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {
        slug(line.lstrip("#")) for line in page.read_text(encoding="utf-8").splitlines() if line[:1] == "#"
    }


@pytest.mark.parametrize("page", LINKED, ids=named)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        found = (page.parent / file).resolve() if file else page
        assert found.exists(), f"{named(page)} links to {target}"
        assert not anchor or anchor in anchors(found), f"{named(page)} links to {target}"


def test_every_page_can_be_reached_from_the_index() -> None:
    seen, waiting = set(), [DOCS / "index.md"]
    while waiting:
        page = waiting.pop()
        if page not in seen and page.suffix == ".md":
            seen.add(page)
            links = re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8"))
            waiting += [(page.parent / link).resolve() for link in links if "://" not in link]
    assert set(DOCS.rglob("*.md")) <= seen


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
    from ckpttool.cli.app import app

    told = "".join(p.read_text(encoding="utf-8") for p in PAGES if p.name != "cli.md")
    for command in app.registered_commands:
        assert command.callback is not None
        assert f"ckpttool {command.name or command.callback.__name__}" in told


def test_every_kind_of_error_is_explained() -> None:
    told = (DOCS / "json.md").read_text(encoding="utf-8")
    kinds = [k.kind for k in vars(errors).values() if isinstance(k, type) and issubclass(k, Exception)]
    assert not [kind for kind in kinds if f"`{kind}`" not in told]


def keys(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(keys, value.values()))
    return set().union(*map(keys, value)) if isinstance(value, list) else set()


def test_every_json_key_is_explained(tmp_path: Path) -> None:
    parity = Parity("actor", 1, 0.0, 0.0, 0.0, 0.0, within=True)
    documents = {
        "json.md": [
            summary(SAMPLE).document(),
            digest(SAMPLE).document(),
            convert(SAMPLE, str(tmp_path / "agent.pt"), dry_run=True).document(),
            Verification("a", "b", ("numpy", "numpy"), (parity,), "", (), ()).document(),
            *(row.document() for row in listing("formats")),
        ],
        "sidecar.md": [Sidecar("").document()],
    }
    for page, found in documents.items():
        told = (DOCS / page).read_text(encoding="utf-8")
        unexplained = {key for document in found for key in keys(document) if f"`{key}`" not in told}
        assert not unexplained - {"attr", "index", "key"}, page


@pytest.mark.environment
def test_every_key_of_an_evaluation_is_explained() -> None:
    pytest.importorskip("gymnasium")
    from ckpttool.ops.algorithms import Asked, algorithm, compare
    from ckpttool.ops.evaluate import evaluate
    from ckpttool.ops.ranking import Scored

    found: Evaluation = evaluate(SAMPLE, "Pendulum-v1", Protocol(episodes=2))
    told = (DOCS / "json.md").read_text(encoding="utf-8")
    run = algorithm([Asked(SAMPLE, (SAMPLE,))], (Scored(found, None),), 1)
    assert run is not None
    document = found.document() | {"versions": {}} | run.document() | compare(run, run).document()
    document["environment"]["versions"] = {}
    assert not [key for key in keys(document) if f"`{key}`" not in told]
