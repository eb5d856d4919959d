"""Event files: TensorFlow writes and reads as referee; torn, damaged and hostile files; records' laws."""

from __future__ import annotations

import math
import struct
import tracemalloc
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.core import ChecksumError, File, FormatError, TruncatedError
from ckpttool.encodings import ScalarEvent, protobuf
from tests.golden_texts import Golden
from tests.tensorflow_child import run_each

TENSORFLOW = pytest.mark.skipif(find_spec("tensorflow") is None, reason="needs tensorflow")
ALL = ("a", "t", "loss", "weights", "note", "charts/episodic_return", "new")
VALUES = [0.0, -1.5, 1e30, 3.25]


def write_as_tensorflow(folder: Path) -> Any:
    """Write the same values by TensorFlow 2 and 1, among other summaries (in the child)."""
    import tensorflow as tf

    writer = tf.summary.create_file_writer(str(folder / "two"))
    with writer.as_default():
        for step, value in enumerate(VALUES):
            # What tf.summary.scalar does (tensorboard/plugins/scalar/summary_v2.py), without TensorBoard.
            tf.summary.write("Common/average_test_return", tf.constant(value), step=step * 100)
            tf.summary.write("loss", tf.constant(value + 1), step=step * 100)
            tf.summary.write("weights", tf.zeros([30, 3], tf.float64), step=step)
            tf.summary.write("note", tf.constant("a text"), step=step)
    writer.close()
    with tf.Graph().as_default():
        one = tf.compat.v1.summary.FileWriter(str(folder / "one"), graph=tf.compat.v1.get_default_graph())
        for step, value in enumerate(VALUES):
            tag = tf.compat.v1.Summary.Value(tag="episode_reward", simple_value=value)
            one.add_summary(tf.compat.v1.Summary(value=[tag]), step * 100)
        one.close()
    return True


def read_by_tensorflow(folder: Path) -> Any:
    """Read our own file as TensorFlow does (in the child)."""
    import tensorflow as tf

    (path,) = folder.glob("events*")
    return [
        [
            event.file_version,
            event.wall_time,
            event.step,
            {v.tag: v.simple_value for v in event.summary.value},
        ]
        for event in tf.compat.v1.train.summary_iterator(str(path))
    ]


@pytest.fixture(scope="module")
def referee(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    written, own = tmp_path_factory.mktemp("theirs"), tmp_path_factory.mktemp("ours")
    records = [protobuf.event_file_header(12.5), protobuf.summary_record(13.0, 70, {"a": 1.5, "eval/b": 0.0})]
    (own / "events.out.tfevents.1.x").write_bytes(b"".join(records))
    return written, run_each(__file__, {"write_as_tensorflow": written, "read_by_tensorflow": own})


def read(path: Path, *tags: str) -> list[ScalarEvent]:
    return list(protobuf.iter_scalars(File.stamp(str(path)), tags or ALL))


@TENSORFLOW
@pytest.mark.parametrize(
    ("folder", "tag"), [("two", "Common/average_test_return"), ("one", "episode_reward")]
)
def test_tensorflows_files_are_read(referee: tuple[Path, Any], folder: str, tag: str) -> None:
    (path,) = (referee[0] / folder).glob("events.out.tfevents.*")
    expected = [ScalarEvent(tag, step * 100, float(np.float32(value))) for step, value in enumerate(VALUES)]
    assert read(path, tag) == expected
    assert {event.tag for event in read(path, tag, *ALL)} == ({tag, "loss"} if folder == "two" else {tag})


@TENSORFLOW
def test_tensorflow_reads_our_files(referee: tuple[Path, Any]) -> None:
    assert referee[1]["read_by_tensorflow"] == [
        ["brain.Event:2", 12.5, 0, {}],
        ["", 13.0, 70, {"a": 1.5, "eval/b": 0.0}],
    ]


# tf.summary.scalar("Common/average_test_return", 2.5, step=100) of TensorFlow 2.21 with TensorBoard 2.21.
GOLDEN = (
    "440000000000000043592e9a09946d375971c0da4110642a370a350a1a436f6d6d6f6e2f617665726167655f746573745f72657475"
    "726e420a080112002204000020404a0b0a090a077363616c61727399a3325e"
)


def test_tensorboards_scalar_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes.fromhex(GOLDEN))
    assert read(path, "Common/average_test_return") == [ScalarEvent("Common/average_test_return", 100, 2.5)]


def test_torchs_files_are_read(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="torch writes event files by tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("charts/episodic_return", 2.5, 7)
        writer.add_scalar("new", 3.5, 8, new_style=True)
    (path,) = tmp_path.glob("events.out.tfevents.*")
    assert read(path) == [ScalarEvent("charts/episodic_return", 7, 2.5), ScalarEvent("new", 8, 3.5)]


def test_the_bytes_of_a_record(tmp_path: Path) -> None:
    # The record that TensorFlow writes first, with the wall time left out.
    data = b"\x1a\x0dbrain.Event:2"
    record = protobuf.encode_record(data)
    assert record[:8] == (15).to_bytes(8, "little")
    assert record[12:-4] == data
    assert len(record) == 8 + 4 + 15 + 4
    path = tmp_path / "x"
    path.write_bytes(record * 3)
    assert [(at, bytes(data)) for at, data in protobuf.iter_records(File.stamp(str(path)))] == [
        (0, data),
        (31, data),
        (62, data),
    ]


@given(st.lists(st.binary(max_size=60), max_size=12), st.integers(13, 90))
def test_there_and_back(tmp_path_factory: pytest.TempPathFactory, datas: list[bytes], block: int) -> None:
    path = tmp_path_factory.mktemp("records") / "x"
    path.write_bytes(b"".join(map(protobuf.encode_record, datas)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protobuf, "_BLOCK", block)
        assert [bytes(data) for _, data in protobuf.iter_records(File.stamp(str(path)))] == datas


def small(steps: int = 3) -> bytes:
    return protobuf.event_file_header(0) + b"".join(
        protobuf.summary_record(0, step, {"a": step}) for step in range(steps)
    )


def test_a_file_that_is_cut_anywhere_gives_what_came_before(tmp_path: Path) -> None:
    whole, path = small(), tmp_path / "x"
    ends = [len(small(n)) for n in range(4)]
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        events: list[ScalarEvent] = []
        stream: Iterator[ScalarEvent] = protobuf.iter_scalars(File.stamp(str(path)), ALL)
        if size in (0, *ends):
            events.extend(stream)
        else:
            with pytest.raises(TruncatedError) as caught:
                events.extend(stream)
            start = max(end for end in (0, *ends) if end < size)
            assert (caught.value.file, caught.value.offset) == (str(path), start)
        assert len(events) == max(0, sum(end <= size for end in ends) - 1)


def test_a_changed_byte_is_found_anywhere(tmp_path: Path) -> None:
    whole, path = small(2), tmp_path / "x"
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises((ChecksumError, TruncatedError)):
            read(path)


def test_a_length_beyond_the_file_allocates_nothing(tmp_path: Path, golden: Golden) -> None:
    length = (1 << 62).to_bytes(8, "little")
    path = tmp_path / "x"
    path.write_bytes(length + protobuf._masked_crc(length) + bytes(50))
    with pytest.raises(TruncatedError) as caught:
        read(path)
    golden(caught.value)


def test_records_that_are_no_events_are_refused(tmp_path: Path, golden: Golden) -> None:
    path = tmp_path / "x"
    path.write_bytes(protobuf.encode_record(b"\xff\xff\xff\xff"))
    with pytest.raises(FormatError) as caught:
        read(path)
    golden(caught.value)


def test_long_records_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protobuf, "MAX_RECORD_BYTES", 100)
    monkeypatch.setattr(protobuf, "_BLOCK", 64)
    graph = protobuf.encode_record(protobuf.encode_message(4, bytes(500)))
    path = tmp_path / "x"
    path.write_bytes(protobuf.event_file_header(0) + graph + protobuf.summary_record(0, 5, {"a": 1}))
    assert read(path) == [ScalarEvent("a", 5, 1.0)]


def tensor(dtype: int, *fields: bytes) -> bytes:
    proto = protobuf.encode_int(1, dtype) + b"".join(fields)
    value = protobuf.encode_text(1, "t") + protobuf.encode_message(8, proto)
    return protobuf.encode_record(protobuf.encode_message(5, protobuf.encode_message(1, value)))


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (tensor(1, protobuf.encode_message(5, struct.pack("<f", 2.5))), 2.5),
        (tensor(1, protobuf.encode_float(5, 2.5)), 2.5),
        (tensor(1, protobuf.encode_message(4, struct.pack("<f", 2.5))), 2.5),
        (tensor(2, protobuf.encode_double(6, 0.1)), 0.1),
        (tensor(3, protobuf.encode_message(7, b"\x05")), 5.0),
        (tensor(9, protobuf.encode_int(10, -3)), -3.0),
        (tensor(1, protobuf.encode_message(2, b"")), 0.0),
        (tensor(1, protobuf.encode_float(5, math.inf)), math.inf),
    ],
    ids=["packed", "unpacked", "content", "double", "int32", "int64", "empty", "infinite"],
)
def test_scalars_of_every_form(tmp_path: Path, record: bytes, expected: float) -> None:
    path = tmp_path / "x"
    path.write_bytes(record)
    assert read(path) == [ScalarEvent("t", 0, expected)]


@pytest.mark.parametrize(
    "record",
    [
        tensor(1, protobuf.encode_message(2, protobuf.encode_message(2, b"")), b""),  # one dimension
        tensor(7, protobuf.encode_message(8, b"text")),
    ],
    ids=["vector", "text"],
)
def test_what_is_no_scalar_is_passed_over(tmp_path: Path, record: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(record)
    assert read(path) == []


def test_a_scalar_of_the_wrong_size_is_refused(tmp_path: Path, golden: Golden) -> None:
    path = tmp_path / "x"
    path.write_bytes(tensor(2, protobuf.encode_message(6, b"1234")))
    with pytest.raises(FormatError) as caught:
        read(path)
    golden(caught.value)


def test_a_long_file_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protobuf, "_BLOCK", 1 << 16)
    path = tmp_path / "x"
    path.write_bytes(small(12_000))
    tracemalloc.start()
    count = sum(1 for _ in protobuf.iter_scalars(File.stamp(str(path)), ALL))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 12_000
    assert peak < path.stat().st_size / 2
