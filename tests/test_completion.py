"""What a shell offers where TAB is pressed: asked of the shells, by the script that users install."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckpttool.commands.schemas import schema_names
from ckpttool.conversion.targets import EXPORTS, TARGETS
from ckpttool.core.plugins import BUILT_IN
from tests.conftest import ROOT, in_process, refused

# For each what to ask it with: the words before and the word that is begun.
BASH = """
complete -p ckpttool
asked() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _ckpttool_completion ckpttool; echo "${COMPREPLY[*]}"; }
asked ckpttool in
asked ckpttool convert a.pt b --to s
"""
FISH = """
complete -C 'ckpttool in'
complete -C 'ckpttool convert a.pt b --to s'
"""
# The script is a function of the words in their variables; what it evaluates is a call of _arguments.
ZSH = """
compdef() { :; }
_arguments() { print -r -- "$1"; }
source =(ckpttool --show-completion)
words=(ckpttool in); CURRENT=2; _ckpttool_completion
words=(ckpttool convert a.pt b --to s); CURRENT=6; _ckpttool_completion
"""


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """An environment with the program on its PATH and an empty home."""
    program = tmp_path / "bin" / "ckpttool"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ckpttool "$@"\n')
    program.chmod(0o755)
    path = os.pathsep.join((str(program.parent), os.environ["PATH"]))
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}


def run(shell: str, script: str, env: dict[str, str]) -> str:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    bare = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    done = subprocess.run(
        [shell, *bare, "-c", script], capture_output=True, text=True, env=env, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


def beginning(letter: str) -> list[str]:
    return sorted(word for word in (*TARGETS, *EXPORTS) if word.startswith(letter))


def test_bash_completes(home: dict[str, str]) -> None:
    lines = run("bash", f'eval "$(ckpttool --show-completion)"{BASH}', home).splitlines()
    # Where we offer nothing bash offers files: a PATH is completed as ever.
    assert shlex.split(lines[0]) == ["complete", "-o", "default", "-F", "_ckpttool_completion", "ckpttool"]
    assert lines[1] == "inspect"
    assert sorted(lines[2].split()) == beginning("s")


def test_fish_completes(home: dict[str, str]) -> None:
    lines = run("fish", f"ckpttool --show-completion | source\n{FISH}", home).splitlines()
    words = [line.split("\t")[0] for line in lines]
    assert words[0] == "inspect"
    assert sorted(words[1:]) == beginning("s")


def test_zsh_completes(home: dict[str, str]) -> None:
    first, *rest = run("zsh", ZSH, home).splitlines()
    assert '"inspect"' in first
    assert all(f'"{word}"' in "".join(rest) for word in beginning("s"))


@pytest.mark.parametrize(
    ("shell", "begins"),
    [
        ("bash", "_ckpttool_completion()"),
        ("zsh", "#compdef ckpttool"),
        ("fish", "complete --command ckpttool"),
    ],
)
def test_a_named_shell_gets_its_own_script(shell: str, begins: str) -> None:
    ran = in_process("--show-completion", shell)
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.startswith(begins)


def test_another_shell_is_refused() -> None:
    assert "bash" in refused(in_process("--show-completion", "tcsh"))


def offered(*words: str) -> list[str]:
    """Return what is offered for the last of the words, as bash asks for it."""
    variables = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    ran = in_process(env={"_CKPTTOOL_COMPLETE": "complete_bash", **variables})
    assert ran.status == 0, ran.err
    return ran.out.split()


def test_commands_options_and_the_words_that_they_take_are_offered() -> None:
    assert {"inspect", "convert", "eval", "schema"} <= set(offered("ckpttool", ""))
    assert offered("ckpttool", "inspect", "--de") == ["--depth"]
    assert offered("ckpttool", "inspect", "--sort", "") == ["file", "size", "name"]
    assert offered("ckpttool", "inspect", "--layout", "td3") == ["td3_torch", "td3_tf"]
    assert set(offered("ckpttool", "eval", "a.pt", "--layout", "")) == {p.name for p in BUILT_IN["layouts"]}
    assert set(offered("ckpttool", "eval", "a.pt", "--backend", "")) == {p.name for p in BUILT_IN["backends"]}
    assert offered("ckpttool", "eval", "a.pt", "--dtype", "") == ["float32", "float64"]
    assert offered("ckpttool", "convert", "a", "b", "--to", "saf") == ["safetensors"]
    assert offered("ckpttool", "diff", "a", "b", "--by", "a") == ["auto", "agent"]
    assert offered("ckpttool", "schema", "") == list(schema_names())
    # Nothing for a path: the shell offers files.
    assert offered("ckpttool", "inspect", "sample") == []


@pytest.mark.environment
def test_environments_are_offered() -> None:
    pytest.importorskip("gymnasium")
    assert "Pendulum-v1" in offered("ckpttool", "eval", "a.pt", "--env", "Pend")
    assert "HalfCheetah-v5" in offered("ckpttool", "doctor", "a.pt", "--env", "HalfC")


def test_the_script_can_be_installed_for_good(home: dict[str, str]) -> None:
    # It finds out which shell has called it.
    run("bash", "ckpttool --install-completion; true", home)
    script = Path(home["HOME"]) / ".bash_completions" / "ckpttool.sh"
    assert str(script) in (Path(home["HOME"]) / ".bashrc").read_text()
    assert "_CKPTTOOL_COMPLETE=complete_bash" in script.read_text()
