"""Failures of the system at any call of any command: one sentence, status 2, nothing left behind."""

from __future__ import annotations

import builtins
import errno
import hashlib
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.cli import main
from tests.conftest import ROOT, TF_SAMPLE, TORCH_SAMPLE, in_process

# What opens, reads, lists, writes and publishes files.
READING = [(os, "open"), (os, "pread"), (os, "stat"), (os, "fstat"), (os, "listdir"), (os, "scandir")]
WRITING = [(os, "replace"), (os, "rename"), (os, "link"), (os, "mkdir"), (os, "fsync"), (os, "statvfs")]
CALLS: list[tuple[Any, str]] = [(builtins, "open"), *READING, *WRITING]
# Failures of one call are tried at as many places of a command as this.
PLACES = 8
NUMBERS = (errno.EACCES, errno.ENOMEM, errno.EIO, errno.EMFILE, errno.ENOSPC)


class Injected:
    """Counts calls made by our code, and makes one of them fail."""

    def __init__(self, at: int | None, make: Callable[[], BaseException]) -> None:
        self.at, self.make, self.count, self.failed = at, make, 0, False

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **more: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.startswith("ckpttool"):
                self.count += 1
                if self.count == self.at:
                    self.failed = True
                    raise self.make()
            return call(*arguments, **more)

        return wrapped


class Stdout(io.BytesIO):
    """A stdout that takes a number of bytes, and can be read after it was closed."""

    def __init__(self, number: int, room: int = 0) -> None:
        super().__init__()
        self.number, self.room = number, room

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self.room:
            raise OSError(self.number, os.strerror(self.number))
        return super().write(data)

    def close(self) -> None:
        pass


COMMANDS: dict[str, list[str]] = {
    "inspect": ["inspect", "agent.pt"],
    "inspect a folder": ["inspect", "."],
    "inspect, drawn": ["inspect", "tf/ckpt-15000", "--graph", "out.svg"],
    "digest": ["digest", "tf/ckpt-15000"],
    "stats": ["stats", "agent.pt"],
    "doctor": ["doctor", "agent.pt"],
    "check": ["check", "."],
    "textconv": ["textconv", "small.npz"],
    "diff": ["diff", "agent.pt", "tf/ckpt-15000", "--by", "agent"],
    "convert": ["convert", "agent.pt", "out/x.npz", "--no-verify"],
    "convert to several files": ["convert", "agent.pt", "out.d", "--to", "tf", "--no-verify"],
    "replace": ["convert", "small.npz", "old.safetensors", "--force"],
    "report": ["report", "small.npz", "--out", "out.html"],
    "schema": ["schema", "inspect"],
    "limits": ["limits"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "place"
    (folder / "tf").mkdir(parents=True)
    (folder / "out").mkdir()
    shutil.copy(TORCH_SAMPLE, folder / "agent.pt")
    shutil.copy(f"{TORCH_SAMPLE}.ckpttool.json", folder / "agent.pt.ckpttool.json")
    for file in TF_SAMPLE.parent.glob("ckpt-15000.*"):
        shutil.copy(file, folder / "tf")
    np.savez(folder / "small.npz", a=np.ones(3))
    assert in_process("convert", folder / "small.npz", folder / "old.safetensors").status == 0
    return folder


def state(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def required(status: int, out: str, err: str, words: list[str]) -> None:
    assert status in (0, 1, 2), (words, err)
    assert "Traceback" not in out + err, (words, err)
    assert "unexpected" not in out + err, (words, out[-300:], err)
    assert "CKPTTOOL_TRACEBACK" not in out + err, (words, err)
    if status == 2 and "--json" not in words:
        assert err.startswith("ckpttool: "), (words, err)


def failures(count: int) -> Iterator[int]:
    """Give the numbers of the calls that are made to fail: the first, the last, and some between."""
    yield from sorted({1 + round(n * (count - 1) / (PLACES - 1)) for n in range(PLACES)} if count else ())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_call_that_fails_is_one_sentence(name: str, folder: Path) -> None:
    words = COMMANDS[name]
    whole = state(folder)
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)

    def run(at: int | None, number: int, *more: str) -> tuple[int, int, str, str]:
        def make() -> BaseException:
            return MemoryError() if number == errno.ENOMEM else OSError(number, os.strerror(number), "a/file")

        shutil.rmtree(folder)
        shutil.copytree(copy, folder)
        injected, out = Injected(at, make), Stdout(0, 1 << 30)
        with pytest.MonkeyPatch.context() as patch:
            for module, call in CALLS:
                patch.setattr(module, call, injected.wrap(getattr(module, call)))
            status, err = into(out, [*words, *more], folder)
        return injected.count, status, out.getvalue().decode(), err

    count, status, out, err = run(None, 0)
    assert status in (0, 1), err
    new = set(state(folder)) - set(whole)
    for number, at in zip(itertools.cycle(NUMBERS), failures(count), strict=False):
        more = ["--json"] if number == errno.EIO else []
        _, status_then, out_then, err_then = run(at, number, *more)
        required(status_then, out_then, err_then, [*words, *more])
        after = state(folder)
        assert {file: after.get(file) for file in whole if "old." not in file} == {
            file: digest for file, digest in whole.items() if "old." not in file
        }
        if status_then == 2:
            # What was there is there, and no half of a target. A receipt whose target stands keeps its
            # temporary name, and what could not be removed stays.
            left = {file for file in set(after) - set(whole) if "ckpttool-tmp" not in file}
            assert not left or left >= new, (at, count, left)
            assert after["old.safetensors"] == whole["old.safetensors"]
        if more and status_then == 2 and words[0] != "check":
            assert set(json.loads(out_then)["error"]) >= {"kind", "message", "file", "hint"}
        if not more and status_then != 2 and words[0] != "textconv":
            # What is not refused is what it would have been.
            assert (status_then, out_then) == (status, out), (at, count, err_then)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_stdout_that_takes_no_more_is_one_sentence(name: str, folder: Path) -> None:
    for number, room in ((errno.ENOSPC, 0), (errno.EIO, 5)):
        for more in ([], ["--json"]):
            shutil.rmtree(folder / "out", ignore_errors=True)
            (folder / "out").mkdir()
            for left in folder.glob("out.*"):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            status, err = into(Stdout(number, room), [*COMMANDS[name], *more], folder)
            assert status == 2
            assert err.startswith("ckpttool: "), err
            assert "unexpected" not in err
            assert "Traceback" not in err


def into(stream: io.BytesIO, words: list[str], folder: Path) -> tuple[int, str]:
    """Run a command with a stdout of its own; return its status and what it said on stderr."""
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ckpttool", *words])
        patch.setattr(sys, "path", list(sys.path))
        patch.setenv("PYTHONSAFEPATH", "1")
        patch.setattr(sys, "stdout", io.TextIOWrapper(stream, encoding="utf-8"))
        patch.setattr(sys, "stderr", err)
        patch.chdir(folder)
        with pytest.raises(SystemExit) as left:
            main()
    return int(left.value.code or 0), err.buffer.getvalue().decode()  # type: ignore[attr-defined]


# --- As a process -------------------------------------------------------------------------------------------


def shell(line: str, folder: Path) -> tuple[int, str, str]:
    """Run a line of a shell in which `ckpttool` is the command."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    function = 'ckpttool() { "$PYTHON" -P -m ckpttool "$@"; }; '
    done = subprocess.run(
        ["bash", "-c", function + line],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "words", ["inspect agent.pt", "inspect agent.pt --json", "--help", "inspect none --json"]
)
def test_a_stdout_that_is_full_or_closed(words: str, folder: Path) -> None:
    for where in (">/dev/full", ">&-"):
        status, out, err = shell(f"ckpttool {words} {where}", folder)
        assert (status, out) == (2, ""), where
        assert err.startswith("ckpttool: "), where
        assert "Traceback" not in err
    # Where stderr is gone as well, the status is all that is left.
    command = f"ckpttool {words} >/dev/full 2>/dev/full"
    assert shell(command, folder) == (2, "", "")


def test_a_reader_that_goes_away_is_no_error(folder: Path) -> None:
    for words in ("inspect agent.pt", "inspect agent.pt --json", "--help"):
        assert shell(f"ckpttool {words} | true; exit ${{PIPESTATUS[0]}}", folder) == (0, "", "")


def test_no_file_gets_the_number_of_a_closed_stream(folder: Path) -> None:
    """Else what a library prints would be written into the target."""
    status, _, _ = shell("ckpttool convert agent.pt x.npz >/dev/null 2>&- <&-", folder)
    assert status == 0
    assert sorted(np.load(folder / "x.npz").files)


@pytest.mark.skipif(sys.platform != "linux", reason="what a limit counts differs from system to system")
@pytest.mark.parametrize("limit", ["-v 60000", "-v 120000", "-v 150000", "-n 5", "-f 1"])
def test_a_limit_of_the_system_is_one_sentence(limit: str, folder: Path) -> None:
    words = ["convert", "agent.pt", "x.npz", "--no-verify"]
    whole = state(folder)
    status, out, err = shell(f"ulimit {limit}; ckpttool {' '.join(words)}", folder)
    required(status, out, err, words)
    assert status != 1, err
    if status == 2:
        assert state(folder) == whole


def test_a_sidecar_with_more_activations_than_layers_is_refused(folder: Path) -> None:
    file = folder / "agent.pt.ckpttool.json"
    record = json.loads(file.read_text())
    record["activations"] = ["relu", "relu", "tanh"]
    file.write_text(json.dumps(record))
    for words in (["eval", "agent.pt", "--episodes", "1"], ["convert", "agent.pt", "x", "--to", "tf"]):
        error = in_process(*words, "--json", cwd=folder).json()["error"]
        assert (error["kind"], Path(error["file"]).name) == ("format", file.name)
        assert not list(folder.glob("x*"))
