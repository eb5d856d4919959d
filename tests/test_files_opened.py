"""Every command opens a checkpoint's file a few times, however many tensors it has."""

from __future__ import annotations

import functools
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpttool
from ckpttool.core import File, filesystem
from ckpttool.core.source import keep_open
from tests.conftest import SAMPLES, in_process

# Recognition, listing, the search for code, and two passes over the values.
MOST = 8
COMMANDS = ("check", "convert", "diff", "digest", "doctor", "eval", "inspect", "report", "stats", "textconv")
COMMANDS += ("verify", "verify --all")
# A hook cannot be removed: it counts while there is something to count in.
_OPENED: list[Counter[str]] = []


@functools.cache
def _watch() -> None:
    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and _OPENED and isinstance(arguments[0], str):
            _OPENED[-1][os.path.basename(arguments[0])] += 1

    sys.addaudithook(count)


def count_opened(folder: Path, *arguments: str) -> list[int]:
    """Return how often a command opened each of the files in the folder, without their receipts."""
    _watch()
    _OPENED.append(Counter())
    try:
        ran = in_process(*arguments)
    finally:
        opened = _OPENED.pop()
    assert ran.status in (0, 1), ran.err
    return [opened[name] for name in os.listdir(folder) if not name.endswith(".json")]


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("agents")
    source = str(SAMPLES / "td3_pendulum_torch/ckpt-15000.pt")
    names = ("a.pt", "a.safetensors", "a.npz", "b.pt", "a-1")
    for name in names:
        ckpttool.convert(source, str(folder / name), **({"to": "tf"} if name == "a-1" else {}))
    return {name: str(folder / name) for name in names}


# `textconv` reads a TensorFlow checkpoint under another name.
@pytest.mark.parametrize(
    ("command", "name"),
    [
        (command, name)
        for command in COMMANDS
        for name in ("a.pt", "a.safetensors", "a.npz", "a-1")
        if (command, name) != ("textconv", "a-1")
    ],
)
def test_a_command_opens_a_file_a_few_times(
    name: str, command: str, agents: dict[str, str], tmp_path: Path
) -> None:
    words = [*command.split()[:1], agents[name], *command.split()[1:]]
    words += {
        "diff": [agents["b.pt"]],
        "verify": [agents["b.pt"]],
        "report": ["--out", str(tmp_path / "page.html")],
        "convert": [str(tmp_path / "new.safetensors")],
        "eval": ["--env", "Pendulum-v1", "--episodes", "1"],
    }.get(words[0], [])
    assert 0 < max(count_opened(Path(agents[name]).parent, *words)) <= MOST


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the system lists no open files")
@pytest.mark.parametrize("target", ["new.safetensors", "new.pt", "new.npz", "new.weights.h5", "new-1"])
def test_no_file_is_open_when_it_is_renamed(
    target: str, agents: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed = []
    rename = filesystem.rename

    def checked(source: str, name: str, *, replace: bool) -> None:
        links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        assert {os.readlink(link) for link in links if os.path.islink(link)}.isdisjoint({source, name})
        renamed.append(name)
        rename(source, name, replace=replace)

    monkeypatch.setattr(filesystem, "rename", checked)
    to = {"to": "tf"} if target == "new-1" else {}
    for _ in range(2):  # Windows also refuses to replace a file that is open
        ckpttool.convert(agents["a.pt"], str(tmp_path / target), force=True, **to)
    assert renamed


def test_many_files_are_not_all_kept_open(tmp_path: Path) -> None:
    files = []
    for number in range(100):
        (tmp_path / str(number)).write_bytes(bytes([number]))
        files.append(File.stamp(str(tmp_path / str(number))))
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with keep_open(), keep_open():
        assert np.frombuffer(b"".join(file.read(0, 1) for file in files), np.uint8).tolist() == [*range(100)]
        if before:
            assert len(os.listdir("/proc/self/fd")) <= before + 32
    if before:
        assert len(os.listdir("/proc/self/fd")) == before
