"""Entry points of other packages: found wherever their metadata lies, broken ones named, costs bounded."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, TORCH_SAMPLE
from tests.conftest import ckpttool as run
from tests.golden_texts import Golden


def test_a_format_of_another_package_is_found(tmp_path: Path) -> None:
    # A package as pip leaves it behind: a module and its metadata with an entry point.
    info = tmp_path / "shout-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shout\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ckpttool.formats]\nshout = shout_format\n")
    (tmp_path / "shout_format.py").write_text(STRANGER)
    (tmp_path / "x.shout").write_bytes(b"SHOUT" + bytes(8))
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    ran = run("inspect", tmp_path / "x.shout", "--json", env=environment)
    assert ran.status == 0, ran.err
    assert ran.json()["format"] == "shout"
    assert ran.json()["tensors"][0]["shape"] == [2]
    listed = run("formats", "--json", env=environment).json()["formats"]
    assert "shout" in [row["name"] for row in listed]
    # The same name from two packages is an error that names both.
    (info / "entry_points.txt").write_text("[ckpttool.formats]\npytorch = shout_format\n")
    clash = run("formats", env=environment)
    assert clash.status == 2
    assert "shout" in clash.err
    assert "ckpttool" in clash.err


LAYOUT = """
from ckpttool.core import key
from ckpttool.libraries import AgentMetadata, LayoutTable, bind
from ckpttool.libraries.write import LayerNames, NetworkRow, WritingTable, plan_torch_file

TABLE = LayoutTable(
    name="mylab",
    title="agents of my lab",
    framework="torch",
    components={"pi": "actor", "qf": "critic/q1", "qg": "critic/q2"},
    facts=AgentMetadata(head="tanh", hidden="relu", epsilon=1e-5),
)


def recognise(tree, name):
    return bind(tree, TABLE)


def plan(binding, agent, settings):
    rows = [NetworkRow(part, (key(name),), LayerNames("l{n}")) for name, part in TABLE.components.items()]
    return plan_torch_file(WritingTable("my lab", rows, "tanh", needs=("actor",)), binding, agent, settings)
"""


def test_what_another_package_writes_is_a_target(tmp_path: Path) -> None:
    """Formats and layouts that write are targets of `--to`, in hints and where a shell completes."""
    info = tmp_path / "mylab-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mylab\nVersion: 1.0\n")
    rows = "[ckpttool.layouts]\nmylab = mylab_layout\nmybroken = mybroken\nmyread = mylab_read\n"
    (info / "entry_points.txt").write_text(f"{rows}[ckpttool.formats]\nmyshout = myshout\n")
    (tmp_path / "mylab_layout.py").write_text(LAYOUT)
    (tmp_path / "mylab_read.py").write_text(
        LAYOUT.replace("def plan", "def _plan").replace('"mylab"', '"myread"')
    )
    (tmp_path / "mybroken.py").write_text("raise ValueError")
    (tmp_path / "myshout.py").write_text(
        STRANGER.replace(", False,", ", True,").replace('"shout"', '"myshout"')
    )
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    words = {"COMP_WORDS": "ckpttool convert a b --to my", "COMP_CWORD": "5"}
    offered = run(env={**environment, "_CKPTTOOL_COMPLETE": "complete_bash", **words})
    assert offered.out.split() == ["myshout", "mylab"]
    refused = run("convert", TORCH_SAMPLE, tmp_path / "agent", env=environment)
    assert refused.status == 2
    assert {"mylab", "myshout"} <= set(re.findall(r"\w+", refused.err.split("hint:")[1]))
    assert "mybroken" not in refused.err
    os.remove(tmp_path / "mybroken.py")
    (info / "entry_points.txt").write_text("[ckpttool.layouts]\nmylab = mylab_layout\n")
    target = tmp_path / "agent.pt"
    ran = run("convert", TORCH_SAMPLE, target, "--to", "mylab", "--allow-missing", env=environment)
    assert ran.status in (0, 1), ran.err
    written = run("inspect", target, "--json", env=environment).json()
    assert written["layout"] == "mylab"
    assert {tensor["path"].split("/")[0] for tensor in written["tensors"]} == {"pi", "qf", "qg"}
    meant = run("convert", TORCH_SAMPLE, tmp_path / "b.pt", "--to", "mylap", env=environment)
    assert meant.status == 2
    assert "--to mylab" in meant.err


COMMAND = """
from typing import Annotated

import typer

import ckpttool


def run(path: str, count: Annotated[int, typer.Option(min=1, metavar="N", help="How many.")] = 3) -> int:
    \"\"\"List the largest tensors.\"\"\"
    if count > 100:
        {}["x"]
    leaves = sorted(ckpttool.open(path).tree.tensors(), key=lambda entry: -entry[1].nbytes)
    for _, leaf in leaves[:count]:
        print(leaf.nbytes)
    return 1
"""


def put_command(folder: Path, name: str, code: str) -> dict[str, str]:
    """Install a package with a command; return the variables of the environment in which it is one."""
    info = folder / "shout-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shout\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[ckpttool.commands]\n{name} = shout_command\n")
    (folder / "shout_command.py").write_text(code)
    return {"PYTHONPATH": f"{ROOT}:{folder}"}


def test_a_command_of_another_package_runs_as_any_other(tmp_path: Path, golden: Golden) -> None:
    environment = put_command(tmp_path, "largest", COMMAND)
    ran = run("largest", TORCH_SAMPLE, "--count", 2, env=environment)
    assert (ran.status, ran.out) == (1, "16384\n16384\n")
    assert "--count" in run("largest", "--help", env=environment).out
    assert "largest" in run("--help", env=environment).out
    for words in (["largest"], ["largest", "a.pt", "--cuont", 3], ["largest", TORCH_SAMPLE, "--count", 101]):
        ran = run(*words, env=environment)
        assert ran.status == 2
        golden(ran)


@pytest.mark.parametrize("name", ["largest", "inspect"])
def test_a_broken_command_or_a_second_of_its_name_harms_no_other(
    tmp_path: Path, name: str, golden: Golden
) -> None:
    environment = put_command(tmp_path, name, "print(1 / 0)\n")
    assert run("inspect", TORCH_SAMPLE, env=environment).status == 0
    ran = run("largest", TORCH_SAMPLE, env=environment)
    assert ran.status == 2
    golden(ran)


def test_of_two_packages_of_one_name_the_first_counts(tmp_path: Path) -> None:
    for number, group in enumerate(("console_scripts", "ckpttool.formats")):
        info = tmp_path / f"{number}" / f"shout-{number}.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: shout\nVersion: {number}.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\nshout = shout_format\n")
    for order in ((0, 1), (1, 0)):
        path = ":".join([str(ROOT), *(str(tmp_path / f"{number}") for number in order)])
        listed = subprocess.check_output(
            [
                sys.executable,
                "-P",
                "-c",
                "from ckpttool.core.plugins import installed as i; print(i('formats'))",
            ],
            env={**os.environ, "PYTHONPATH": path},
            text=True,
        )
        assert ("shout_format" in listed) == (order[0] == 1)


BROKEN = {
    "a module that is missing": "import nowhere_at_all",
    "an error while it is imported": "print(1 / 0)",
    "a name that a module lacks": "from ckpttool.formats import Crate",
    "broken syntax": "def claims(probe:",
    "no claims": "NAME, TITLE, WRITES, FRAMEWORK = 'shout', '', False, 'numpy'\ndef read(location): ...",
    "an error in claims": "{}['head']",
}


@pytest.mark.parametrize("code", BROKEN.values(), ids=BROKEN)
def test_a_broken_package_is_named(tmp_path: Path, code: str, golden: Golden) -> None:
    info = tmp_path / "shout-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shout\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ckpttool.formats]\nshout = shout_format\n")
    in_claims = STRANGER.replace("return probe.path if", f"return {code} if")
    (tmp_path / "shout_format.py").write_text(in_claims if "head" in code else code + "\n")
    (tmp_path / "x.shout").write_bytes(b"SHOUT" + bytes(8))
    ran = run("inspect", tmp_path / "x.shout", env={"PYTHONPATH": f"{ROOT}:{tmp_path}"})
    assert ran.status == 2
    golden(ran)
    # The command of the hint shows where the module fails.
    if shown := re.search("python -c '(.*?)'", ran.err):
        program = [sys.executable, "-c", shown[1]]
        done = subprocess.run(
            program, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True
        )
        assert b"shout_format.py" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dist-info", "egg-info", "egg", "archive", "finder", "object"])
def test_a_package_is_found_wherever_its_metadata_lies(tmp_path: Path, kind: str) -> None:
    location = tmp_path / ("shout-1.0.egg" if kind == "egg" else "place")
    info = location / ("EGG-INFO" if kind == "egg" else f"shout-1.0.{kind if '-' in kind else 'dist-info'}")
    info.mkdir(parents=True)
    (info / ("PKG-INFO" if "egg" in kind else "METADATA")).write_text(
        "Metadata-Version: 2.1\nName: shout\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text("[ckpttool.formats]\nshout = shout_format\n")
    search_path = str(location)
    if kind == "archive":
        search_path = shutil.make_archive(str(tmp_path / "packed"), "zip", location)
    code = tmp_path / "code"
    code.mkdir()
    (code / "shout_format.py").write_text(STRANGER)
    if kind == "finder":
        (code / "sitecustomize.py").write_text(FINDER.format(place=search_path))
        search_path = ""
    elif kind == "object":
        program = f"import pathlib, sys; sys.path.append(pathlib.Path({search_path!r}))"
        (code / "sitecustomize.py").write_text(program)
        search_path = ""
    environment = {"PYTHONPATH": ":".join(filter(None, [str(ROOT), str(code), search_path]))}
    listed = run("formats", "--json", env=environment)
    assert "shout" in [row["name"] for row in listed.json()["formats"]]


FINDER = """
import importlib.metadata, sys

class Finder(importlib.metadata.MetadataPathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None

    @classmethod
    def find_distributions(cls, context):
        return super().find_distributions(importlib.metadata.DistributionFinder.Context(path=[{place!r}]))

sys.meta_path.append(Finder)
"""


def test_packages_without_entry_points_of_ours_are_not_parsed(tmp_path: Path) -> None:
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text("[console_scripts]\nckpttool.formats = other:main\n")
    program = (
        "import sys; from ckpttool.core import plugins; plugins.installed('formats'); "
        "sys.exit('importlib.metadata' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    subprocess.run([sys.executable, "-S", "-c", program], env=environment, check=True)


STRANGER = """
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.tree import Leaf, key
from ckpttool.core.source import File, Span
from ckpttool.core.tree import Tree

NAME, TITLE, WRITES, FRAMEWORK = "shout", "A stranger's format", False, "numpy"

def claims(probe):
    return probe.path if probe.head.startswith(b"SHOUT") else None

def read(location):
    file = File.stamp(location)
    leaf = Leaf("float32", (2,), Span(file, 5, 8), "x")
    return Checkpoint(location, NAME, Tree({(key("x"),): leaf}), (file,))
"""
