"""Strings of a file in every output of every command: none of them reaches the reader raw."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ckpttool.cli import console, styles
from ckpttool.conversion.write import save
from ckpttool.core import clean
from tests.conftest import TORCH_SAMPLE, Terminal, in_process
from tests.trees import torch_tree

# Colour, bell, backspace, C1's CSI, a link, bidi overrides and isolates, zero width, line separators, and
# what would make a line of its own.
FORGED = "FORGED-LINE"
NASTY = (
    "\x1b[31m\x1b[8m\x07\x08\x9b31m\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\\u202a\u202e\u2066\u2069\u200b"
    f"\u2028\u2029\x85\x00\x7f\r{FORGED}\r\n{FORGED}\n[bold]markup[/bold][link=http://evil]x[/link]\t"
)
OWN_STYLES = re.compile(r"\x1b\[[0-9;]*m")
# What no text may contain when our own styles and line ends are taken away.
FORBIDDEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + len(data).to_bytes(4, "little") + data


def objects(surrogate: bool) -> bytes:
    """Return a pickle of an object whose class, keys and values are all nasty."""
    nasty = NASTY + ("\ud800" if surrogate else "")
    content = text(f"module{nasty}") + text(f"Class{nasty}") + b"\x93)\x81}(" + text(nasty) + text(nasty)
    content += text(f"act{nasty}") + text("os") + text("system") + b"\x93" + text(nasty) + b"\x85Rub"
    short = text("m") + text(f"\n{FORGED}\n") + b"\x93)\x81}(" + text("x") + b"K\x07ub"
    return b"\x80\x04}(" + text(f"args{nasty}") + content + text("short") + short + text("step") + b"K\x07u."


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One file of each kind, in a folder with such a name."""
    top = tmp_path_factory.mktemp("nasty")
    folder = top / NASTY.replace("/", "_").replace("\x00", "")
    folder.mkdir()
    names = {f"{NASTY}.l{n}.weight": np.full((2, 2), n, np.float32) for n in range(2)}
    files = {}

    def position(name: str) -> Path:
        files[name] = folder / name
        return files[name]

    save(torch_tree({**names, NASTY: 3.5, "nan": np.array([np.nan], np.float32)}), str(position("torch.pt")))
    position("object.pkl").write_bytes(objects(surrogate=False))
    position("surrogate.pkl").write_bytes(objects(surrogate=True))
    with zipfile.ZipFile(position("names.npz"), "w") as archive:
        for name, array in names.items():
            with archive.open(name.replace("\x00", "") + ".npy", "w") as stream:
                np.save(stream, array)
    header = {
        "__metadata__": {NASTY: NASTY},
        **{
            name: {"dtype": "F32", "shape": [2], "data_offsets": [8 * n, 8 * n + 8]}
            for n, name in enumerate(names)
        },
    }
    encoded = json.dumps(header).encode()
    position("names.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(16))
    keras_h5(position("keras.h5"))
    shutil.copy(TORCH_SAMPLE, position("agent.pt"))
    sidecar = json.loads(Path(f"{TORCH_SAMPLE}.ckpttool.json").read_text())
    sidecar["env"]["id"] = NASTY
    sidecar["assumed"] = [NASTY]
    sidecar["provenance"] = dict.fromkeys(sidecar["provenance"], NASTY)
    sidecar["residue"] = [{"path": NASTY, "note": NASTY}]
    Path(f"{files['agent.pt']}.ckpttool.json").write_text(json.dumps(sidecar))
    position("none.pt")
    position("text.pt").write_text(NASTY)
    return files


def keras_h5(file: Path) -> None:
    import h5py

    name = NASTY.replace("\x00", "").replace("/", "_")
    config = {
        "class_name": NASTY,
        "config": {"name": NASTY, "layers": [{"class_name": NASTY, "config": {"name": NASTY}}]},
    }
    with h5py.File(file, "w") as opened:
        opened.attrs["model_config"] = json.dumps(config)
        opened.attrs["keras_version"] = name
        opened.attrs["backend"] = name
        weights = opened.create_group("model_weights")
        weights.attrs["layer_names"] = [name.encode()]
        layer = weights.create_group(name)
        layer.attrs["weight_names"] = [f"{name}/kernel:0".encode()]
        layer[f"{name}/kernel:0"] = np.ones((2, 2), np.float32)


def commands(name: str, file: str) -> Iterator[list[str]]:
    yield ["inspect", file, "--keys", "--aliases", "--names"]
    yield ["inspect", file, "--glob", NASTY.replace("\x00", "")]
    yield ["inspect", os.path.dirname(file)]
    yield ["digest", file]
    yield ["stats", file, "--depth", "1"]
    yield ["stats", file]
    yield ["doctor", file]
    yield ["check", file, file]
    yield ["textconv", file]
    yield ["diff", file, str(TORCH_SAMPLE)]
    yield ["convert", file, f"{file}.out.npz", "--dry-run"]
    yield ["convert", file, f"{file}.out.safetensors", "--force"]
    yield ["convert", file, f"{file}.out", "--to", NASTY.replace("\x00", "")]
    if name == "agent.pt":
        yield ["eval", file, "--episodes", "1"]
        yield ["eval", file, "--env", NASTY.replace("\x00", ""), "--episodes", "1"]


def require_inert(text: str, words: list[str], *, styles: bool = False) -> None:
    plain = OWN_STYLES.sub("", text) if styles else text
    match = FORBIDDEN.search(plain)
    assert match is None, (words[0], plain[max(0, match.start() - 80) : match.end() + 40])
    assert not [line for line in plain.splitlines() if line.startswith(FORGED)], words
    assert "\x1b[8m" not in text
    assert "\x1b[31m" not in text


NAMES = ["torch.pt", "object.pkl", "surrogate.pkl", "names.npz", "names.safetensors", "keras.h5", "agent.pt"]


@pytest.mark.parametrize("name", [*NAMES, "none.pt", "text.pt"])
def test_no_string_of_a_file_reaches_the_reader_raw(files: dict[str, Path], name: str) -> None:
    file = str(files[name])
    for words in commands(name, file):
        for kind in (None, Terminal):
            ran = in_process(*words, **({"kind": kind, "env": {"TERM": "xterm-256color"}} if kind else {}))
            assert ran.status in (0, 1, 2)
            assert "unexpected" not in ran.err, ran.err
            require_inert(ran.out, words, styles=kind is not None)
            require_inert(ran.err, words)
        ran = in_process(*words, "--json")
        assert ran.out.isascii(), words
        require_inert(ran.out, words)
        require_inert(ran.err, words)
        json.loads(ran.out)


def written(folder: Path, *words: str) -> Iterator[tuple[str, str]]:
    """Run a command that writes into the folder; give the name and the text of each file."""
    before = set(folder.rglob("*"))
    ran = in_process(*words, cwd=folder)
    assert ran.status in (0, 1), ran.err
    require_inert(ran.out + ran.err, list(words))
    paths = [file for file in set(folder.rglob("*")) - before if file.is_file()]
    assert paths
    for file in paths:
        yield file.name, file.read_bytes().decode("utf-8", "replace")


@pytest.mark.parametrize("name", NAMES)
def test_pages_and_drawings_show_strings_as_text(files: dict[str, Path], name: str, tmp_path: Path) -> None:
    file = str(files[name])
    for words in (
        ["report", file, "--out", "page.html"],
        ["report", file, str(TORCH_SAMPLE), "--out", "two.html"],
        *(["inspect", file, "--graph", f"drawing{end}"] for end in (".svg", ".dot", ".html")),
    ):
        for built, content in written(tmp_path, *words):
            require_inert(content, [built])
            assert not re.search("<(script|link)[^>]*evil", content)


@pytest.mark.environment
def test_results_of_a_play_are_inert(files: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / files["agent.pt"].parent.name
    folder.mkdir()
    shutil.copy(TORCH_SAMPLE, folder / "a$x$.pt")
    words = ["eval", str(folder / "a$x$.pt"), "--env", "Pendulum-v1", "--episodes", "2", "--chart"]
    words += ["--csv", "x.csv", "--plot", "x.svg", "--out", "x.json"]
    for name, content in written(tmp_path, *words):
        require_inert(content, [name])


def test_only_our_own_styles_pass() -> None:
    styled = f"{styles.style_code('1')}x\x1b[1my{styles.style_code('0')}"
    assert styles.escape_controls(styled, styles=True) == "\x1b[1mx\\x1b[1my\x1b[0m"
    assert styles.escape_controls(styled) == "x\\x1b[1my"


def test_what_libraries_print_is_escaped_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", sys.stdout)
        patch.setattr(sys, "stderr", sys.stderr)
        console.guard_streams()
        print(f"a\tb {NASTY}")  # noqa: T201  # as a library does
        print(NASTY, file=sys.stderr)  # noqa: T201
        sys.stderr.writelines([NASTY, "\n"])
    for text in capsys.readouterr():
        assert FORBIDDEN.search(text) is None
        assert r"\x1b[31m" in text


def test_every_character_that_does_not_print_is_escaped() -> None:
    for number in (
        *range(0x20),
        *range(0x7F, 0xA0),
        0xAD,
        0x200B,
        0x2028,
        0x202E,
        0x2066,
        0xFEFF,
        0xD800,
        0xE0001,
    ):
        assert clean(f"a{chr(number)}b").isascii()
        assert styles.escape_controls(f"a{chr(number)}b").isascii()
    assert styles.escape_controls("a\nb") == "a\nb"
