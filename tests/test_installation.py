"""The command that installs something beside ckpttool, for each way to install ckpttool itself."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from ckpttool.cli.console import print_error
from ckpttool.cli.next_steps import format_next_steps
from ckpttool.cli.styles import format_fix
from ckpttool.core import UsageError
from ckpttool.core.installation import install_command, install_extra
from tests.conftest import ROOT


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment of this process that nothing but its folder describes."""
    folder = tmp_path / "tools" / "ckpttool"
    (folder / "bin").mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(folder))
    monkeypatch.setattr(sys, "executable", str(folder / "bin" / "python"))
    monkeypatch.setenv("PATH", str(folder / "bin"))
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    came_from(monkeypatch, None)
    return folder


def came_from(monkeypatch: pytest.MonkeyPatch, origin: object) -> None:
    """Let the package's record say from where it was installed; None for an index."""

    class Installed:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return None if origin is None else json.dumps(origin)

    monkeypatch.setattr(metadata, "distribution", lambda _: Installed())


def add_program(prefix: Path, name: str) -> None:
    program = prefix / "bin" / name
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)


def test_pip_of_this_environment(prefix: Path) -> None:
    add_program(prefix, "pip")
    assert install_extra("eval") == "pip install 'ckpttool[eval]'"


def test_another_environments_pip_is_not_named(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other" / "bin").mkdir(parents=True)
    add_program(tmp_path / "other", "pip")
    monkeypatch.setenv("PATH", str(tmp_path / "other" / "bin"))
    assert shlex.split(install_extra("eval")) == [sys.executable, "-m", "pip", "install", "ckpttool[eval]"]


@pytest.mark.parametrize("active", [False, True])
def test_an_environment_without_pip(prefix: Path, monkeypatch: pytest.MonkeyPatch, active: bool) -> None:
    add_program(prefix, "uv")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    if active:
        monkeypatch.setenv("VIRTUAL_ENV", str(prefix))
    where = [] if active else ["--python", sys.executable]
    assert shlex.split(install_command("torch")) == ["uv", "pip", "install", *where, "torch"]


def test_pipx(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = prefix.parent.parent / "venvs" / "ckpttool-next"
    prefix.rename(installed.parent.mkdir() or installed)
    (installed / "pipx_metadata.json").write_text("{}")
    monkeypatch.setattr(sys, "prefix", str(installed))
    assert shlex.split(install_extra("eval")) == ["pipx", "inject", "ckpttool-next", "ckpttool[eval]"]


@pytest.mark.parametrize(
    ("argv", "words"), [(["/x/ckpttool", "eval", "a b"], ["eval", "a b"]), (["train.py", "--fast"], [])]
)
@pytest.mark.parametrize(
    ("record", "first"),
    [("pipx_metadata.json", ["pipx", "run", "--spec"]), ("../CACHEDIR.TAG", ["uvx", "--from"])],
)
def test_an_environment_in_a_cache_runs_the_command_again(
    prefix: Path,
    monkeypatch: pytest.MonkeyPatch,
    record: str,
    first: list[str],
    argv: list[str],
    words: list[str],
) -> None:
    (prefix / record).write_text("{}")
    monkeypatch.setattr(sys, "argv", argv)
    assert shlex.split(install_extra("eval")) == [*first, "ckpttool[eval]", "ckpttool", *words]
    with_torch = shlex.split(install_command("ckpttool[eval]", "torch"))
    assert with_torch == [*first, "ckpttool[eval]", "--with", "torch", "ckpttool", *words]


@pytest.mark.parametrize(
    ("receipt", "expected"),
    [
        ('{ name = "ckpttool" }', ["uv", "tool", "install", "ckpttool[eval]", "--with", "sb3-contrib"]),
        (
            '{ name = "ckpttool", extras = ["onnx"] }, { name = "jax" }',
            ["uv", "tool", "install", "ckpttool[eval,onnx]", "--with", "jax", "--with", "sb3-contrib"],
        ),
    ],
)
def test_a_tool_of_uv_keeps_what_it_has(prefix: Path, receipt: str, expected: list[str]) -> None:
    (prefix / "uv-receipt.toml").write_text(f"[tool]\nrequirements = [{receipt}]\n")
    assert shlex.split(install_command("ckpttool[eval]", "sb3-contrib")) == expected


@pytest.mark.parametrize(
    "receipt", ["", "[tool", "[tool]\nrequirements = 3\n", '[tool]\nrequirements = [{ a = "b" }]\n']
)
def test_a_receipt_that_says_nothing_installs_into_its_environment(prefix: Path, receipt: str) -> None:
    (prefix / "uv-receipt.toml").write_text(receipt)
    expected = ["uv", "pip", "install", "--python", sys.executable, "ckpttool[eval]"]
    assert shlex.split(install_extra("eval")) == expected


@pytest.mark.parametrize(
    ("origin", "requirement"),
    [
        (None, "ckpttool[eval]"),
        ({"url": "file:///home/me/my%20src", "dir_info": {}}, "ckpttool[eval] @ file:///home/me/my%20src"),
        ({"url": "https://x.org/c.whl", "archive_info": {}}, "ckpttool[eval] @ https://x.org/c.whl"),
        (
            {"url": "https://x.org/c", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "ckpttool[eval] @ git+https://x.org/c@abc",
        ),
    ],
)
def test_uvx_comes_from_where_it_came(
    prefix: Path, monkeypatch: pytest.MonkeyPatch, origin: object, requirement: str
) -> None:
    (prefix.parent / "CACHEDIR.TAG").touch()
    came_from(monkeypatch, origin)
    assert shlex.split(install_extra("eval")) == ["uvx", "--from", requirement, "ckpttool"]


@pytest.mark.parametrize("origin", [None, {"url": "https://x.org/c.whl", "archive_info": {}}])
@pytest.mark.parametrize(
    ("record", "runner", "option"),
    [("pipx_metadata.json", ("pipx", "run"), "--spec"), ("../CACHEDIR.TAG", ("uvx",), "--from")],
)
def test_commands_in_hints_start_as_the_program_was_started(
    prefix: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    record: str,
    runner: tuple[str, ...],
    option: str,
    origin: object,
) -> None:
    def printed() -> list[str]:
        print_error(UsageError("wrong", hint="ckpttool inspect a.pt, or ckpttool --help"), as_json=False)
        return [
            *format_next_steps([("stats", "a.pt")]),
            format_fix("ckpttool convert a.pt b.npz"),
            capsys.readouterr().err,
        ]

    installed = printed()
    (prefix / record).write_text("{}")
    came_from(monkeypatch, origin)
    own = (option, "ckpttool @ https://x.org/c.whl") if origin else ()
    program = shlex.join((*runner, *own, "ckpttool"))
    assert printed() == [
        re.sub("ckpttool (?=inspect|--help|stats|convert)", f"{program} ", text) for text in installed
    ]
    # The command that installs is one already.
    monkeypatch.setattr(sys, "argv", ["ckpttool", "browse"])
    hint = install_extra("browse")
    print_error(UsageError("missing", hint=hint), as_json=False)
    assert hint in capsys.readouterr().err


def test_an_environment_that_nobody_activated_is_named(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "own"], check=True)
    python = str(tmp_path / "own" / "bin" / "python")
    # The package needs numpy, which that environment lacks; the module alone does not.
    file = str(ROOT / "ckpttool" / "core" / "installation.py")
    code = f"import runpy; print(runpy.run_path({file!r})['install_command']('torch'))"
    without_uv = {**os.environ, "PATH": os.path.dirname(sys.executable)}
    ran = subprocess.run(
        [python, "-I", "-c", code], env=without_uv, capture_output=True, text=True, check=True
    )
    assert shlex.split(ran.stdout) == [python, "-m", "pip", "install", "torch"]
