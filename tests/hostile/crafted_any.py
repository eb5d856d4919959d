"""What is no checkpoint or is not given as a plain file; names that a terminal must not show as they are."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from tests.conftest import TORCH_SAMPLE
from tests.hostile.case import Case

_LINE = "any file"
_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 1234\n" % (b"a" * 64)


def written(name: str, data: bytes) -> Callable[[Path], Path]:
    """Return the maker of one file of these bytes."""

    def make(folder: Path) -> Path:
        path = folder / name
        path.write_bytes(data)
        return path

    return make


def safetensors(*names: str) -> bytes:
    """Return a file of one float32 scalar for each name."""
    header = {
        name: {"dtype": "F32", "shape": [], "data_offsets": [4 * at, 4 * at + 4]}
        for at, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"\0\0\x80\x3f" * len(names)


def _copied(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        return Path(shutil.copy(TORCH_SAMPLE, folder / name))

    return make


def _linked(name: str, to: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        shutil.copy(TORCH_SAMPLE, folder / "real.pt")
        (folder / name).symlink_to(to)
        return folder / name

    return make


def _loop(folder: Path) -> Path:
    (folder / "one.pt").symlink_to("two.pt")
    (folder / "two.pt").symlink_to("one.pt")
    return folder / "one.pt"


def _fifo(folder: Path) -> Path:
    os.mkfifo(folder / "model.pt")
    return folder / "model.pt"


def _socket(folder: Path) -> Path:
    # A socket's own path may have no more than 107 bytes.
    here = os.open(folder, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{here}/model.pt")
    finally:
        os.close(here)
    return folder / "model.pt"


def _special_neighbours(folder: Path) -> Path:
    _fifo(folder)
    shutil.copy(TORCH_SAMPLE, folder / "real.pt")
    (folder / "loop.index").symlink_to("loop.index")
    (folder / "checkpoint").mkdir()
    return folder


def _empty_folder(folder: Path) -> Path:
    (folder / "run").mkdir()
    return folder / "run"


def _long_name(folder: Path) -> Path:
    return folder / ("x" * 70_000 + ".pt")


def _unreadable(folder: Path) -> Path:
    path = Path(shutil.copy(TORCH_SAMPLE, folder / "model.pt"))
    path.chmod(0)
    return path


def _non_utf8(folder: Path) -> Path:
    return Path(shutil.copy(TORCH_SAMPLE, folder / os.fsdecode(b"caf\xe9.pt")))


def _fixed(path: str) -> Callable[[Path], Path]:
    return lambda _: Path(path)


_NAMES = {
    "escape": "\x1b[2J\x1b]0;owned\x07weight",
    "nul": "we\0ight",
    "bidi": "weight\u202egnp.exe\u2066",
    "newline": "a\nckpttool: all is well\r\n",
    "c1": "\x9b31mred\x85",
    "zero-width": "wei\u200bght\ufeff",
    "traversal": "../../../../etc/passwd",
    "absolute": "/etc/passwd",
    "windows": "C:\\Windows\\..\\evil",
    "markup": "[bold red]x[/] [link=http://x]y[/link] :warning:",
    "template": "{{7*7}}${7*7}%s%n{0.__class__}",
    "html": "<script>alert(1)</script>&amp;",
    "leading-dash": "--json",
}

_DEEP = ".".join("n" * 20_000)

CASES = (
    Case("any-0-bytes", _LINE, written("model.pt", b"")),
    Case("any-1-byte", _LINE, written("model.pt", b"x")),
    Case("any-1-byte-zero", _LINE, written("model.npz", b"\0")),
    Case("any-html", _LINE, written("model.pt", b"<!DOCTYPE html><html><body>403")),
    Case("any-html-later", _LINE, written("x.h5", b"\n \n<html lang=en>Sign in")),
    Case("any-lfs-pointer", _LINE, written("x.safetensors", _POINTER)),
    Case("any-json-error", _LINE, written("x.pt", b'{"error": "Invalid credentials"}')),
    Case(
        "any-elf",
        _LINE,
        written("x.pt", b"\x7fELF\x02\x01\x01" + b"\0" * 200),
    ),
    Case("any-wrong-extension", _LINE, _copied("model.safetensors"), 0, 0, 0, shows="pytorch"),
    Case("any-no-extension", _LINE, _copied("model"), 0, 0, 0, shows="pytorch"),
    Case("any-empty-folder", _LINE, _empty_folder),
    Case("any-special-neighbours", _LINE, _special_neighbours, 0, 0, 0, shows="pytorch"),
    Case("any-fifo", _LINE, _fifo),
    Case("any-socket", _LINE, _socket),
    Case("any-device-null", _LINE, _fixed("/dev/null")),
    Case("any-device-zero", _LINE, _fixed("/dev/zero")),
    Case("any-missing", _LINE, _fixed("no/such/model.pt")),
    Case("any-dangling-link", _LINE, _linked("model.pt", "gone.pt")),
    Case("any-link-loop", _LINE, _loop),
    Case("any-link-to-a-checkpoint", _LINE, _linked("model.pt", "real.pt"), 0, 0, 0, shows="pytorch"),
    Case("any-name-too-long", _LINE, _long_name),
    Case("any-name-not-utf-8", _LINE, _non_utf8, 0, 0, 0, shows="caf\\udce9.pt"),
    Case("any-name-escape", _LINE, _copied("a\x1b[31mb\n.pt"), 0, 0, 0, shows="a\\x1b[31mb\\n.pt"),
    Case("any-name-bidi", _LINE, _copied("tp.\u202egnp.pt"), 0, 0, 0, shows="tp.\\u202egnp.pt"),
    *(
        # Root reads everything.
        [Case("any-unreadable", _LINE, _unreadable)] if os.geteuid() else []
    ),
    *(
        Case(f"any-tensor-name-{word}", _LINE, written("x.safetensors", safetensors("a", name)), 0, 0, 0)
        for word, name in _NAMES.items()
    ),
    # A zip archive, which npz is, has no names of such a length.
    Case("any-tensor-name-64-KB", _LINE, written("x.safetensors", safetensors("n" * 65_536)), 0, 0, 2),
    Case("any-tensor-name-surrogate", _LINE, written("x.safetensors", safetensors("\ud800"))),
    # Every module above a tensor has a line: their paths together grow with the square of the depth.
    Case(
        "any-tensor-name-deep",
        _LINE,
        written("x.safetensors", safetensors(_DEEP)),
        2,
        0,
        0,
    ),
)
