"""JSON documents: what they may ask for, and what no two readers may understand differently."""

from __future__ import annotations

import json
import random
import re
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpttool.core import FormatError, LimitError, Limits, using
from ckpttool.core import text as documents
from tests.golden_texts import Golden

BOTH = pytest.mark.parametrize("read", [documents.parse_json, documents.parse_strict_json])
Read = Callable[[bytes, str], dict[str, Any]]


@BOTH
@pytest.mark.parametrize(
    ("text", "limit"),
    [
        (b'{"a": 1, "b": 2}', "json_bytes"),
        (b'{"a":[' + b"[]," * 30 + b"[]]}", "json_values"),
        (b'{"a":{' + b",".join(b'"%d":1' % n for n in range(40)) + b"}}", "json_values"),
        (b'{"a":"\\"' + b"," * 60 + b'","b":[' + b"0," * 40 + b"0]}", "json_values"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "json_depth"),
        (b'{"a":' + b"[" * 100_000, "json_depth"),
    ],
    ids=["bytes", "lists", "names", "behind a text", "objects", "open lists"],
)
def test_what_asks_for_more_than_a_limit_names_it(read: Read, text: bytes, limit: str) -> None:
    small = (
        Limits()
        if limit == "json_depth"
        else replace(Limits(), **{limit: 10 if limit == "json_bytes" else 30})
    )
    with using(small), pytest.raises(LimitError) as caught:
        read(text, "NAME")
    assert "NAME" in caught.value.message
    assert limit in str(caught.value.hint)


@BOTH
def test_commas_and_brackets_in_texts_are_no_values(read: Read) -> None:
    text = {"a": "[{,\\" * 50, "[" * 50: '"}],' * 50}
    with using(replace(Limits(), json_values=3)):
        assert read(json.dumps(text).encode(), "the text") == text


@BOTH
def test_values_are_counted_where_strings_are_full_of_marks(read: Read) -> None:
    choose = random.Random(5)
    # Long enough that the parts in which the text is split end in strings and within escapes.
    for _ in range(6):
        names = ["".join(choose.choices('"\\\\,[{é\n', k=choose.randrange(40))) for _ in range(8_000)]
        text = {"a": [name if choose.randrange(3) else [name, {}] for name in names]}
        data = json.dumps(text, ensure_ascii=bool(choose.randrange(2))).encode()
        bare = re.sub(rb'"(?:[^"\\]|\\.)*"', b"", data)
        count = sum(map(bare.count, (b",", b"[", b"{")))
        with using(replace(Limits(), json_values=count)):
            assert read(data, "the text") == text
        with using(replace(Limits(), json_values=count - 1)), pytest.raises(LimitError) as caught:
            read(data, "the text")
        assert caught.value.found == f"{count:,}"


@BOTH
def test_too_many_values_are_refused_in_little_memory(read: Read) -> None:
    data = b"{" + b",".join(b'"%x":["F32",[1]]' % number for number in range(100_000)) + b"}"
    tracemalloc.start()
    try:
        with using(replace(Limits(), json_values=250_000)), pytest.raises(LimitError):
            read(data, "the text")
        assert tracemalloc.get_traced_memory()[1] < 2 * len(data)
    finally:
        tracemalloc.stop()


@BOTH
@pytest.mark.parametrize("text", [b'{"a":"' + b'\\"' * 3_000_000, b'"' * 6_000_001, b'\\"' * 3_000_000])
def test_a_text_without_an_end_takes_no_time(read: Read, text: bytes) -> None:
    began = time.process_time()
    with using(replace(Limits(), json_values=1000)), pytest.raises(FormatError):
        read(text, "the text")
    assert time.process_time() - began < 3


def test_levels_are_counted_where_a_document_is_walked(golden: Golden) -> None:
    def nested(levels: int) -> bytes:
        return b'{"a":' + b"[" * (levels - 1) + b"1" + b"]" * (levels - 1) + b"}"

    with using(replace(Limits(), json_depth=5)):
        assert documents.parse_json(nested(5), "the text")
        assert documents.parse_json(b'{"a":' + b"[" + b"[]," * 50 + b"[]]}", "the text")
        with pytest.raises(LimitError) as caught:
            documents.parse_json(nested(6), "the text")
        golden(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b'{"a":{"b":1,"b":1}}', id="inner name twice"),
        pytest.param(b'{"a":1,"\\u0061":1}', id="escaped name twice"),
        pytest.param(b'{"a":NaN}', id="NaN"),
        pytest.param(b'{"a":-Infinity}', id="-Infinity"),
        pytest.param(b'{"a":"\\ud800"}', id="surrogate"),
        pytest.param(b'{"\\udfff":1}', id="surrogate in a name"),
        pytest.param(b'{"a":"\xed\xa0\x80"}', id="encoded surrogate"),
        pytest.param('{"a":1}'.encode("utf-16"), id="UTF-16"),
        pytest.param(b'{"a":' + b"1" * 5000 + b"}", id="5,000 digits"),
        pytest.param(b"[1]", id="list"),
        pytest.param(b"", id="empty"),
    ],
)
def test_strict_refuses_what_readers_differ_in(text: bytes, golden: Golden) -> None:
    with pytest.raises(FormatError) as caught:
        documents.parse_strict_json(text, "the text")
    golden(caught.value)
    assert documents.parse_strict_json(b'{"a":"\\ud83d\\ude00"}', "the text") == {"a": "\U0001f600"}


def test_a_file_is_measured_before_it_is_read(tmp_path: Path, golden: Golden) -> None:
    with (tmp_path / "x.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(LimitError) as caught:
        documents.load_json(str(tmp_path / "x.json"), "settings")
    golden(caught.value)
