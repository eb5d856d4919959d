"""What the process that lists HDF5 files may say: everything else is refused, whatever became of it."""

from __future__ import annotations

import base64
import copy
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpttool.core import CkpttoolError, File, FormatError, LimitError, Span, WorkerError, limits
from ckpttool.formats import hdf5
from tests.golden_texts import Golden

TEXT = base64.b64encode((2).to_bytes(8, "little") + b"ab").decode()
ANSWER: dict[str, Any] = {
    "groups": [
        {"path": "", "address": 0, "ordered": False, "attributes": {"layer_names": ["a"], "name": None}}
    ],
    "datasets": [
        {
            "path": "a",
            "address": 64,
            "dtype": "float32",
            "big": False,
            "shape": [4],
            "stored": 16,
            "offset": 512,
        },
        {
            "path": "c",
            "address": 128,
            "dtype": "float64",
            "big": True,
            "shape": [4],
            "stored": 16,
            "chunk": [2],
            "chunks": [[[0], 600, 16, 0]],
            "filters": [[1, [4], "deflate"]],
            "fill": base64.b64encode(bytes(8)).decode(),
        },
        {
            "path": "t",
            "address": 192,
            "dtype": "string",
            "big": False,
            "shape": [1],
            "stored": 0,
            "inline": TEXT,
        },
    ],
    "same": [["b", "a"]],
    "notes": ["x is a soft link"],
}


@pytest.fixture
def base(tmp_path: Path) -> Span:
    (tmp_path / "x.h5").write_bytes(bytes(1024))
    return hdf5.whole_file(File.stamp(str(tmp_path / "x.h5")))


def test_an_honest_answer_is_the_listing(base: Span, golden: Golden) -> None:
    index = hdf5.index_from_records(base, ANSWER)
    assert list(index.datasets) == ["a", "c", "t"]
    assert index.datasets["a"].source == Span(base.file, 512, 16)
    assert index.same == {"b": "a"}
    golden("\n".join(index.notes))


def put(*steps: Any) -> Callable[[dict[str, Any]], None]:
    """Return what puts the last of the steps at the place to which the others lead."""
    *way, last, value = steps

    def change(document: Any) -> None:
        for step in way:
            document = document[step]
        document[last] = value

    return change


def without(*steps: Any) -> Callable[[dict[str, Any]], None]:
    *way, last = steps

    def change(document: Any) -> None:
        for step in way:
            document = document[step]
        del document[last]

    return change


def twice(document: dict[str, Any]) -> None:
    document["datasets"].append({**document["datasets"][0], "offset": 700})


NONSENSE = {
    "no groups": without("groups"),
    "no root": put("groups", 0, "path", "g"),
    "two names alike": twice,
    "a group and a dataset alike": put("datasets", 0, "path", ""),
    "path is bytes": put("datasets", 0, "path", 7),
    "unknown type": put("datasets", 0, "dtype", "float33"),
    "type is a list": put("datasets", 0, "dtype", []),
    "negative size": put("datasets", 0, "shape", [-4]),
    "size is true": put("datasets", 0, "shape", [True]),
    "size is a float": put("datasets", 0, "shape", [4.0]),
    "size behind 0": put("datasets", 0, "shape", [0, 1 << 62, 4]),
    "shape is a text": put("datasets", 0, "shape", "4"),
    "negative offset": put("datasets", 0, "offset", -16),
    "offset is a text": put("datasets", 0, "offset", "512"),
    "offset is none": put("datasets", 0, "offset", None),
    "huge address": put("datasets", 0, "address", 1 << 64),
    "negative chunk offset": put("datasets", 1, "chunks", 0, 1, -600),
    "negative chunk size": put("datasets", 1, "chunks", 0, 2, -1),
    "chunk of more numbers": put("datasets", 1, "chunks", 0, [[0], 600, 16]),
    "chunk at no multiple": put("datasets", 1, "chunks", 0, 0, [1]),
    "chunk of another rank": put("datasets", 1, "chunks", 0, 0, [0, 0]),
    "two chunks in one place": put("datasets", 1, "chunks", [[[0], 600, 16, 0], [[0], 700, 16, 0]]),
    "chunks of nothing": put("datasets", 1, "chunk", [0]),
    "chunks of no rank": put("datasets", 1, "chunk", []),
    "unreadable of a type that is read": put("datasets", 0, "unreadable", "numbers"),
    "unknown and no reason": put("datasets", 0, "dtype", "unknown"),
    "filters are a text": put("datasets", 1, "filters", "x"),
    "fill of another size": put("datasets", 1, "fill", "AAAA"),
    "fill is no base64": put("datasets", 1, "fill", "A"),
    "fewer texts": put("datasets", 2, "shape", [2]),
    "more texts": put("datasets", 2, "shape", [0]),
    "many texts": put("datasets", 2, "shape", [1 << 62]),
    "text beyond its end": put("datasets", 2, "inline", base64.b64encode(b"\xff" * 8).decode()),
    "strings elsewhere": without("datasets", 2, "inline"),
    "attributes are a list": put("groups", 0, "attributes", [1]),
    "attribute is a number": put("groups", 0, "attributes", "name", 7),
    "attribute of numbers": put("groups", 0, "attributes", "layer_names", [7]),
    "same is a text": put("same", "x"),
    "note is a dict": put("notes", [{}]),
}
ELSEWHERE = {
    "offset beyond the file": put("datasets", 0, "offset", 1020),
    "offset far beyond": put("datasets", 0, "offset", (1 << 64) - 8),
    "chunk beyond the file": put("datasets", 1, "chunks", 0, 1, 1020),
    "another size": put("datasets", 0, "stored", 8),
    "chunk outside of the shape": put("datasets", 1, "chunks", 0, 0, [4]),
    "address without size": put("datasets", 0, "stored", 0),
    "shared bytes": put("datasets", 1, "chunks", 0, 1, 520),
    "an object in data": put("datasets", 2, "address", 513),
    "data in an object": put("datasets", 0, "offset", 128),
}


@pytest.mark.parametrize("change", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_refused(base: Span, change: Callable[[dict[str, Any]], None]) -> None:
    document = copy.deepcopy(ANSWER)
    change(document)
    with pytest.raises(FormatError) as empty:
        hdf5.index_from_records(base, {})
    with pytest.raises(FormatError) as caught:
        hdf5.index_from_records(base, document)
    # The same error as for an answer without any list.
    assert str(caught.value) == str(empty.value)
    assert caught.value.file == base.file.path


@pytest.mark.parametrize("change", ELSEWHERE.values(), ids=ELSEWHERE)
def test_places_that_cannot_be_are_refused(base: Span, change: Any, golden: Golden) -> None:
    document = copy.deepcopy(ANSWER)
    change(document)
    with pytest.raises(FormatError) as caught:
        hdf5.index_from_records(base, document)
    golden(caught.value)


def test_many_small_bombs_are_one(base: Span, golden: Golden) -> None:
    row = {
        "path": "z",
        "address": 900,
        "dtype": "uint8",
        "big": False,
        "shape": [1000],
        "stored": 0,
        "fill": "AA==",
    }
    rows = [{**row, "path": f"z{number}", "address": 900 + number} for number in range(3)]
    with limits.using(replace(limits.Limits(), expanded_bytes=2500, expanded_ratio=1)):
        assert hdf5.index_from_records(base, ANSWER | {"datasets": rows[:2]}).datasets[
            "z1"
        ].source.read() == bytes(1000)
        datasets = hdf5.index_from_records(base, ANSWER | {"datasets": rows}).datasets
        with pytest.raises(LimitError) as caught:
            datasets["z0"].source.read()
        golden(caught.value)


@pytest.mark.parametrize(
    "output",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"[" * 10_000, id="deep"),
        pytest.param(b"[]", id="list"),
        pytest.param(b'{"refused": 7}', id="number"),
        pytest.param(b'{"refused": ["format"]}', id="no sentence"),
        pytest.param(b'{"refused": ["limit", "deep", "hdf5_depth", "x"]}', id="text as number"),
        pytest.param(b'{"refused": ["limit", "deep", "__class__", 3]}', id="unknown limit"),
        pytest.param(b'{"refused": ["what", "\\u001b[2J\\n\\ud800"]}', id="control characters"),
        pytest.param(b'{"a":' + b"[]," * 20_000 + b"[]]}", id="many values"),
        pytest.param(b" " * 300_000, id="many bytes"),
    ],
)
def test_what_a_broken_process_says_is_one_sentence(output: bytes, golden: Golden) -> None:
    with (
        limits.using(replace(limits.Limits(), hdf5_objects=1000)),
        pytest.raises(FormatError) as caught,
    ):
        hdf5._parse_output(output, 0, "x")
    golden(caught.value)


@pytest.mark.parametrize(
    ("number", "kind"),
    [(signal.SIGKILL, WorkerError), (signal.SIGSEGV, FormatError), (signal.SIGABRT, FormatError)],
)
def test_a_process_that_the_system_ends_is_no_damaged_file(
    number: signal.Signals, kind: type[CkpttoolError]
) -> None:
    with pytest.raises(kind) as caught:
        hdf5._parse_output(b"", -number, "x.h5")
    assert caught.value.file == "x.h5"
    assert ("damaged" in caught.value.message) == (kind is FormatError)
