"""The files of TensorFlow's checkpoints: shards, links, the ways to name one, the state file `checkpoint`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tests.bundle_writer import entry, masked, shape
from tests.hostile.bundles import FLOATS, GOOD, SHARD, Make, file, index_of, listed
from tests.hostile.case import BAIT, Case

_LINE = "TF index"
_LINKS = "symlinked shard"
_STATE = "`checkpoint` file with absolute/.. paths"
_BUNDLE = listed(GOOD)


def _then(change: Callable[[Path], object], make: Make = _BUNDLE, relative: str = "x.index") -> Make:
    """Return the maker of a bundle that is changed after it was written."""

    def output(folder: Path) -> Path:
        make(folder)
        change(folder)
        return folder / relative

    return output


def _linked(folder: Path, name: str, target: Path | str) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to(target)


def _to_bait(folder: Path) -> None:
    """Point the shard at a file outside, which even has the tensor's bytes."""
    (folder.parent / BAIT).write_bytes(FLOATS)
    _linked(folder, SHARD, Path("..") / BAIT)


def _within(folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / SHARD).rename(folder / "data" / "0")
    _linked_new(folder, SHARD, "data/0")


def _linked_new(folder: Path, name: str, target: str) -> None:
    (folder / name).symlink_to(target)


def _cached(folder: Path) -> None:
    """Lie as in the cache of Hugging Face's hub: all files of a snapshot are links into a folder of blobs."""
    for part in ("blobs", "snapshot"):
        (folder / part).mkdir()
    for number, name in enumerate(("x.index", SHARD)):
        (folder / name).rename(folder / "blobs" / str(number))
        _linked_new(folder / "snapshot", name, f"../blobs/{number}")


def _fifo(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def _sparse(folder: Path) -> None:
    """2^28 strings of no length, all of them there: a hole of 256 MiB."""
    with (folder / SHARD).open("wb") as stream:
        stream.truncate((1 << 28) + 4)


def _huge(name: str, size: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        os.truncate(folder / name, size)

    return change


_HOLES = file(index_of({b"w": entry(7, shape(1 << 28), 0, (1 << 28) + 4, masked(b""))}))
_BROKEN = listed(entry(1, shape(-4), 0, 16, masked(FLOATS)))


def _relative_path(as_: str) -> str:
    return {"prefix": "x", "shard": SHARD, "folder": ".", "index": "x.index"}[as_]


_FILES = (
    Case("bundle-shard-missing", _LINE, _then(lambda folder: (folder / SHARD).unlink()), 0),
    Case(
        "bundle-shard-folder",
        _LINE,
        _then(lambda folder: ((folder / SHARD).unlink(), (folder / SHARD).mkdir())),
    ),
    Case("bundle-shard-fifo", _LINE, _then(_fifo(SHARD))),
    Case("bundle-index-fifo", _LINE, _then(_fifo("x.index"), relative="x")),
    Case("bundle-shard-out", _LINKS, _then(_to_bait)),
    Case("bundle-shard-nowhere", _LINKS, _then(lambda folder: _linked(folder, SHARD, "gone"))),
    Case("bundle-shard-within", _LINKS, _then(_within), 0, 0, 0, shows="w"),
    Case("bundle-cached", _LINKS, _then(_cached, relative="snapshot"), 0, 0, 0, shows="w"),
    Case("bundle-strings-in-a-hole", _LINE, _then(_sparse, _HOLES), 0),
    Case("bundle-index-600-mib", _LINE, _then(_huge("x.index", 600 << 20))),
    *(
        Case(
            f"bundle-as-{way}", _LINE, _then(lambda _: None, relative=_relative_path(way)), 0, 0, 0, shows="w"
        )
        for way in ("prefix", "shard", "folder")
    ),
    *(
        Case(f"bundle-broken-as-{way}", _LINE, _then(lambda _: None, _BROKEN, _relative_path(way)))
        for way in ("prefix", "shard", "folder")
    ),
)


def _state(text: bytes, change: Callable[[Path], object] = lambda _: None, relative: str = ".") -> Make:
    """Return the maker of a folder with a bundle and a state file."""

    def output(folder: Path) -> Path:
        _BUNDLE(folder)
        (folder / "checkpoint").write_bytes(text)
        change(folder)
        return folder / relative

    return output


def _names(latest: bytes) -> bytes:
    return b'model_checkpoint_path: "' + latest + b'"\n'


def _folder_out(folder: Path) -> None:
    """A folder within is a link to one outside, where a sound checkpoint lies."""
    outside = folder.parent / "elsewhere"
    outside.mkdir()
    _BUNDLE(outside)
    (folder / "sub").symlink_to(outside)
    (folder / "x.index").unlink()


def _index_out(folder: Path) -> None:
    outside = folder.parent / "elsewhere"
    outside.mkdir()
    _BUNDLE(outside)
    for name in ("x.index", SHARD):
        _linked(folder, name, outside / name)


_LEADING = (
    Case("state-absolute", _STATE, _state(_names(b"/etc/passwd"))),
    Case("state-up", _STATE, _state(_names(b"../bait.bin"))),
    Case("state-moved", _STATE, _state(_names(b"/home/somebody/x")), 0, 0, 0, shows="/home/somebody/x"),
    Case("state-up-and-beside", _STATE, _state(_names(b"../../x")), 0, 0, 0, shows="../../x"),
    Case("state-up-and-back", _STATE, _state(_names(b"sub/../x")), 0, 0, 0, shows="w"),
    Case(
        "state-through-a-link",
        _STATE,
        _state(_names(b"sub/x"), _folder_out, "checkpoint"),
    ),
    Case("state-to-linked-files", _STATE, _state(_names(b"x"), _index_out, "checkpoint")),
    Case("state-escape", _STATE, _state(_names(b"\\033[31mred"))),
    Case("state-nul", _STATE, _state(_names(b"\\000/x")), 0, 0, 0, shows="w"),
    Case("state-nobody", _STATE, _state(_names(b""))),
    Case("state-garbage", _STATE, _state(_names(b"x") + b"\xff\xfe")),
    Case(
        "state-17-mib",
        _STATE,
        _state(_names(b"x"), _huge("checkpoint", 17 << 20)),
    ),
)

CASES = (*_FILES, *_LEADING)
