"""SavedModels: graphs that are damaged, that would act if they were run, that name files elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tests.bundle_writer import entry, field, shape, varint
from tests.hostile.bundles import CRC, GOOD, SHARD, Make, index_of
from tests.hostile.bundles import file as bundle
from tests.hostile.case import BAIT, Case

_LINE = "SavedModel"


def _meta(more: bytes = b"") -> bytes:
    """A SavedModel of one graph: its tag and TensorFlow's version, then `more` (meta_graph.proto)."""
    return field(1, 1) + field(2, field(1, field(4, "serve") + field(5, "2.15.0")) + more)


def _variable(name: str) -> bytes:
    return field(7, field(1, 1) + field(2, shape(4)) + field(3, 1) + field(6, name))


def _root(*children: int) -> bytes:
    return b"".join(field(1, field(1, child) + field(2, "w")) for child in children) + field(
        4, field(1, "root")
    )


_OBJECTS = field(7, field(1, _root(1)) + field(1, _variable("w")))
_GOOD = _meta(_OBJECTS)


def _model(
    pb: bytes | None, index: bytes | None = None, change: Callable[[Path], object] = lambda _: None
) -> Make:
    """Return the maker of a SavedModel with this graph, a bundle of `w`, and a change after that."""

    def make(folder: Path) -> Path:
        if index != b"":
            (folder / "variables").mkdir()
            bundle(index or index_of({b"w": GOOD}))(folder / "variables")
            for name in ("x.index", SHARD):
                (folder / "variables" / name).rename(folder / "variables" / name.replace("x", "variables", 1))
        if pb is not None:
            (folder / "saved_model.pb").write_bytes(pb)
        change(folder)
        return folder

    return make


def _noted(name: str, pb: bytes, change: Callable[[Path], object] = lambda _: None, shows: str = "") -> Case:
    """A case whose variables are read, and whose graph is not or not all."""
    return Case(f"saved-{name}", _LINE, _model(pb, None, change), 0, 0, 0, shows=shows)


def _refused(name: str, make: Make) -> Case:
    return Case(f"saved-{name}", _LINE, make)


def _node(op: str, name: str, *attributes: bytes) -> bytes:
    return field(1, field(1, name) + field(2, op) + b"".join(attributes))


def _text(key: str, value: str) -> bytes:
    return field(5, field(1, key) + field(2, field(2, value)))


# What would act if TensorFlow ran it: code of Python, a file read, a file written.
_ACTING = (
    _node("PyFunc", "py", _text("token", "os.getcwd")),
    _node("ReadFile", "read", _text("filename", f"../{BAIT}")),
    _node("WriteFile", "write", _text("filename", f"../{BAIT}")),
)
# FunctionDef.node_def is field 3, a GraphDef's node field 1.
_BODY = b"".join(b"\x1a" + node[1:] for node in _ACTING)
_FUNCTION = field(2, field(1, field(1, field(1, "__inference_call_1")) + _BODY))


def _function(name: str, node: bytes, *arguments: str) -> bytes:
    """A GraphDef's library with one function of one node, which _node returns."""
    signature = field(1, name) + b"".join(field(2, field(1, argument)) for argument in arguments)
    return field(2, field(1, field(1, signature) + b"\x1a" + node[1:]))


def _calls(name: str, function: str, *inputs: str) -> bytes:
    attribute = field(5, field(1, "f") + field(2, field(10, field(1, function))))
    return _node("StatefulPartitionedCall", name, *(field(3, input_) for input_ in inputs), attribute)


def _constant(name: str, text: str | bytes) -> bytes:
    return _node(
        "Const", name, field(5, field(1, "value") + field(2, field(8, field(1, 7) + field(8, text))))
    )


def _collection(kind: int, value: bytes) -> bytes:
    return _meta(field(4, field(1, "extra") + field(2, field(kind, field(1, value)))) + _OBJECTS)


def _acting(name: str, pb: bytes, shows: str, change: Callable[[Path], object] = lambda _: None) -> Case:
    """A case whose variables are read, and whose graph does more than compute or cannot be judged."""
    return Case(f"saved-acting-{name}", _LINE, _model(pb, None, change), 0, 0, 0, 1, shows)


def _graph(*nodes: bytes) -> bytes:
    return _meta(field(2, b"".join(nodes)) + _OBJECTS)


# The saver that saved_model.proto's SaverDef names: its path, its result, its restore operation.
_SAVER = field(3, field(1, "path:0") + field(2, "save:0") + field(3, "restore"))
_PATH = _node("Placeholder", "path")
_SAVE = _node("SaveV2", "s", field(3, "file_prefix"))
_TRACED = _function("__inference__traced_save_1", _SAVE, "file_prefix")
_WRITE = _node("WriteFile", "write", field(3, "x"))


def _saved(*nodes: bytes, saver: bytes = _SAVER) -> bytes:
    return _meta(field(2, b"".join(nodes)) + saver + _OBJECTS)


def _beside(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(b"saved_model_schema_version: 1\n")


_ACTS = (
    _acting("unknown", _graph(_node("MyOp", "x")), "MyOp"),
    _acting("escape", _graph(_node("\x1b]0;owned\a", "x")), "owned"),
    _acting(
        "nested",
        _graph(_calls("a", "f"), _function("f", _calls("b", "g")), _function("g", _WRITE)),
        "WriteFile",
    ),
    _acting("no-function", _graph(_calls("a", "elsewhere")), "elsewhere"),
    _acting("late", _graph(_node("Identity", "x", field(2, "WriteFile"))), "WriteFile"),
    _acting("early", _graph(_node("WriteFile", "x", field(2, "Identity"))), "WriteFile"),
    _acting("overlong", _graph(b"\x0a\x8e\x80\x00\x92\x00\x89\x80\x00WriteFile"), "WriteFile"),
    _acting("two-graphs", _meta(field(2, _PATH) + field(2, _function("f", _WRITE)) + _OBJECTS), "WriteFile"),
    _acting(
        "packed", _graph(_constant("c", _WRITE), _node("DatasetFromGraph", "d", field(3, "c"))), "WriteFile"
    ),
    _acting("collection", _collection(2, _WRITE), "WriteFile"),
    _acting(
        "collection-any", _collection(5, field(1, "x/tensorflow.GraphDef") + field(2, _WRITE)), "WriteFile"
    ),
    _acting("collection-pickle", _collection(2, b"\x80\x04cos\ngetcwd\n)R."), "os.getcwd"),
    _acting("print", _graph(_node("PrintV2", "p", _text("output_stream", f"file://../{BAIT}"))), "PrintV2"),
    _acting(
        "save-constant",
        _saved(_constant("path", f"../{BAIT}"), _node("SaveV2", "save", field(3, "path"))),
        "SaveV2",
    ),
    _acting(
        "save-function",
        _saved(_PATH, _calls("save", "f", "path"), _function("f", _SAVE, "file_prefix")),
        "SaveV2",
    ),
    _acting(
        "save-called", _saved(_PATH, _calls("other", "__inference__traced_save_1", "path"), _TRACED), "SaveV2"
    ),
    _acting("no-saver", _saved(_PATH, _node("SaveV2", "save", field(3, "path")), saver=b""), "SaveV2"),
    _acting(
        "table",
        _graph(
            _constant("path", f"../{BAIT}"),
            _node("InitializeTableFromTextFileV2", "t", field(3, "table"), field(3, "path")),
        ),
        "InitializeTableFromTextFileV2",
    ),
    _acting("text", _GOOD, "w", _beside("saved_model.pbtxt")),
    _acting("chunks", _GOOD, "w", _beside("saved_model.cpb")),
    Case("saved-chunks-alone", _LINE, _model(None, b"", _beside("saved_model.cpb")), 0, None, None, 1),
    Case(
        *(
            "saved-saver",
            _LINE,
            _model(_saved(_PATH, _calls("save", "__inference__traced_save_1", "path"), _TRACED)),
        ),
        *(0, 0, 0, 0, "w"),
    ),
)


def _asset(name: str) -> bytes:
    return _meta(field(6, field(1, field(1, "asset:0")) + field(2, name)) + _OBJECTS)


def _nested(levels: int) -> bytes:
    """Messages of field 1 in one another, as many as a parser by recursion would die of."""
    message = b""
    for _ in range(levels):
        message = b"\x0a" + varint(len(message)) + message
    return message


def _fifo(folder: Path) -> None:
    (folder / "saved_model.pb").unlink()
    os.mkfifo(folder / "saved_model.pb")


def _elsewhere(folder: Path) -> None:
    (folder / "variables").rename(folder.parent / "elsewhere")
    (folder / "variables").symlink_to(folder.parent / "elsewhere")


def _shard_out(folder: Path) -> None:
    shard = folder / "variables" / SHARD.replace("x", "variables", 1)
    shard.unlink()
    shard.symlink_to(folder.parent / BAIT)


def _assets_out(folder: Path) -> None:
    (folder / "assets").symlink_to(folder.parent)


def _huge(folder: Path) -> None:
    os.truncate(folder / "saved_model.pb", 600 << 20)


CASES = (
    _noted("good", _GOOD, shows="w"),
    _noted("empty", b""),
    _noted("cut", _GOOD[:-5]),
    _noted("garbage", b"\xff" * 100),
    _noted("html", b"<!DOCTYPE html><html></html>"),
    _noted("lfs", b"version https://git-lfs.github.com/spec/v1\n"),
    _noted("field-2-gib", field(1, 1) + b"\x12" + varint(2 << 30) + b"abc"),
    _noted("field-2-63", field(1, 1) + b"\x12" + varint(1 << 63) + b"abc"),
    _noted("groups", _meta(b"\x13" * 5000)),
    _noted("nested", _meta(field(2, _nested(3000)) + _OBJECTS), shows="w"),
    _noted("nested-objects", _meta(field(7, _nested(3000))), shows="w"),
    _noted("object-77", _meta(field(7, field(1, _root(77))))),
    _noted("object-minus-1", _meta(field(7, field(1, _root(-1))))),
    _noted("cycle", _meta(field(7, field(1, _root(0)) + field(1, _variable("w")))), shows="w"),
    _noted("acting-nodes", _meta(field(2, b"".join(_ACTING)) + _OBJECTS), shows="w"),
    _noted("acting-function", _meta(field(2, _FUNCTION) + _OBJECTS), shows="w"),
    _noted("asset-absolute", _asset("/etc/passwd")),
    _noted("asset-up", _asset(f"../{BAIT}")),
    _noted("asset-nul", _asset("a\0b")),
    _noted("assets-out", _asset("words.txt"), _assets_out),
    _noted("fifo", _GOOD, _fifo),
    _noted("600-mib", _GOOD, _huge),
    _noted("escape", _meta(field(6, field(2, "\x1b]0;owned\a"))), shows="owned"),
    Case(
        *("saved-parts", _LINE, _model(_meta(field(7, b"\x0a\x00" * 3000))), 0, 0, 0),
        options=("--limit", "graph_parts=2000"),
    ),
    _refused("only-garbage", _model(b"\xff" * 100, b"")),
    _refused("no-variables", _model(_GOOD, b"")),
    _refused("index-cut", _model(_GOOD, index_of({b"w": GOOD})[:-8])),
    _refused("entry", _model(_GOOD, index_of({b"w": entry(1, shape(-4), 0, 16, CRC)}))),
    _refused("variables-out", _model(_GOOD, None, _elsewhere)),
    _refused("shard-out", _model(_GOOD, None, _shard_out)),
    *_ACTS,
)
