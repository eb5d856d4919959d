"""V1 checkpoints: what TensorFlow reads of them, which path means which, every broken rule."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pickle
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.core import (
    ChangedError,
    Checkpoint,
    ChecksumError,
    CkpttoolError,
    FormatError,
    Leaf,
    NotFoundError,
    TruncatedError,
    UnsupportedError,
    UsageError,
)
from ckpttool.core.digests import digest_checkpoint
from ckpttool.formats import Probe, open_checkpoint, tf_bundle, tf_v1
from ckpttool.testing.formats import FormatContract
from tests import v1_writer as v1
from tests.golden_texts import Golden
from tests.tensorflow_child import run
from tests.v1_writer import FULL, HALF, ONE, entry, field, floats, header, meta, shape, table

without_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
SIX = {name: np.float32([number, -number]).tobytes() for number, name in enumerate("abcdef")}


class TestTensorflowV1(FormatContract):
    module = tf_v1

    def make(self, folder: Path) -> str:
        (folder / "model.ckpt-1").write_bytes(v1.vectors(SIX, per_block=3))
        return str(folder / "model.ckpt-1")


class TestShardedV1(FormatContract):
    module = tf_v1

    def make(self, folder: Path) -> str:
        for number, names in enumerate(("abc", "def")):
            data = v1.vectors({name: SIX[name] for name in names})
            (folder / f"model-7-{number:05d}-of-00002").write_bytes(data)
        return str(folder / "model-7-?????-of-00002")


def leaves(checkpoint: Checkpoint) -> dict[str, Leaf]:
    return {leaf.key: leaf for _, leaf in checkpoint.tree.tensors()}


def listed(path: Path, data: bytes) -> dict[str, Leaf]:
    path.write_bytes(data)
    return leaves(tf_v1.read(str(path)))


# TensorFlow as the referee.


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("v1")
    return folder, run(v1.__file__, "build", folder)


@pytest.mark.tensorflow
@without_tensorflow
@pytest.mark.parametrize("name", ["types", "random", "cuts", "snappy", "graph_1_False", "graph_1_True"])
def test_what_tensorflow_reads(written: tuple[Path, dict[str, Any]], name: str) -> None:
    folder, facts = written
    checkpoint = open_checkpoint(str(folder / name))
    assert checkpoint.format == "tensorflow_v1"
    listed = leaves(checkpoint)
    assert listed.keys() == facts[name].keys()
    for key, fact in facts[name].items():
        leaf = pickle.loads(pickle.dumps(listed[key]))
        assert (leaf.dtype, list(leaf.shape)) == (fact["dtype"], fact["shape"])
        if leaf.dtype == "string":
            assert [text.decode("latin-1") for text in leaf.strings()] == fact["strings"]
        else:
            assert hashlib.sha256(leaf.read()).hexdigest() == fact["sha256"], key


@pytest.mark.tensorflow
@without_tensorflow
@pytest.mark.parametrize("name", sorted(v1.PROTOS))
def test_tensorflow_judges_the_values_alike(
    written: tuple[Path, dict[str, Any]], name: str, golden: Golden
) -> None:
    folder, facts = written
    wrong = ("repeated_last", "too_many", "content", "another_field", "nothing")
    assert ("error" in facts["protos"][name]) is (name in wrong)
    leaf = leaves(tf_v1.read(str(folder / f"proto_{name}")))["x"]
    if "error" in facts["protos"][name]:
        with pytest.raises(FormatError) as caught:
            leaf.read()
        assert caught.value.file == str(folder / f"proto_{name}")
        golden(caught.value.message)
    else:
        assert hashlib.sha256(leaf.read()).hexdigest() == facts["protos"][name]["sha256"]


@pytest.mark.tensorflow
@without_tensorflow
def test_both_forms_hold_the_same(written: tuple[Path, dict[str, Any]]) -> None:
    digests = set()
    for name in ("graph_1_False", "graph_1_True", "graph_2_False", "graph_2_True"):
        tensors = leaves(open_checkpoint(str(written[0] / name)))
        digests.add(
            tuple((k, leaf.role, leaf.slot, bytes(leaf.read())) for k, leaf in sorted(tensors.items()))
        )
    assert len(digests) == 1
    roles = {row[0]: row[1:3] for row in digests.pop()}
    assert roles["scope/w"] == ("parameter", None)
    assert roles["scope/w/Adam_1"] == ("slot", "v")
    assert roles["global_step"] == ("counter", None)


@pytest.mark.corpus
def test_corpus(corpus: Path) -> None:
    paths = [
        path
        for path in sorted((corpus / "tf" / "tf1_v1").rglob("*"))
        if path.is_file() and tf_v1.claims(Probe(str(path))) is not None
    ]
    assert len(paths) >= 3  # two checkpoints, one of them with a state file
    for path in paths:
        for leaf in leaves(open_checkpoint(str(path))).values():
            assert leaf.array().item() in (0.5, 2.0)


# Which path means which checkpoint.


def claim(path: Path | str) -> str | None:
    assert tf_bundle.claims(Probe(str(path))) is None
    return tf_v1.claims(Probe(str(path)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.ckpt-9").write_bytes(v1.vectors({"w": ONE}))
    for number in range(2):
        data = v1.vectors({f"w{number}": ONE * 3})
        (tmp_path / f"model.ckpt-10-{number:05d}-of-00002").write_bytes(data)
    (tmp_path / "model.ckpt-10.meta").write_bytes(b"graph")
    return tmp_path


def test_the_ways_to_name_a_checkpoint(folder: Path) -> None:
    assert claim(folder / "model.ckpt-9") == str(folder / "model.ckpt-9")
    pattern = str(folder / "model.ckpt-10-?????-of-00002")
    for name in ("model.ckpt-10", "model.ckpt-10-00001-of-00002", "model.ckpt-10-?????-of-00002"):
        assert claim(folder / name) == pattern
    assert list(leaves(tf_v1.read(pattern))) == ["w0", "w1"]
    for name in ("model.ckpt-10-00007-of-00009", "model.ckpt", "model.ckpt-10.meta"):
        assert claim(folder / name) is None


@pytest.mark.parametrize(
    ("latest", "base"),
    [
        ("model.ckpt-9", "model.ckpt-9"),
        ("/tmp/gone/model.ckpt-9", "model.ckpt-9"),
        ("model.ckpt-10-?????-of-00002", "model.ckpt-10-?????-of-00002"),
        ("/gone/model.ckpt-10-?????-of-00002", "model.ckpt-10-?????-of-00002"),
        ("model.ckpt-10", "model.ckpt-10-?????-of-00002"),
    ],
)
def test_state_files(folder: Path, latest: str, base: str) -> None:
    (folder / "checkpoint").write_text(f'model_checkpoint_path: "{latest}"')
    assert claim(folder) == claim(folder / "checkpoint") == str(folder / base)


def test_state_files_lead_nowhere_else(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, golden: Golden
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "secret"
    elsewhere.write_bytes(v1.vectors({"w": ONE}))
    for path in (elsewhere, os.path.relpath(elsewhere, folder)):
        (folder / "checkpoint").write_text(f'model_checkpoint_path: "{path}"')
        with pytest.raises(NotFoundError) as caught:
            tf_v1.claims(Probe(str(folder)))
        golden(str(caught.value).replace(str(path), "ELSEWHERE"))


def test_a_state_file_that_names_half_a_file(folder: Path, golden: Golden) -> None:
    (folder / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-9"')
    whole = (folder / "model.ckpt-9").read_bytes()
    (folder / "model.ckpt-9").write_bytes(whole[:-1])
    with pytest.raises(FormatError) as caught:
        tf_v1.claims(Probe(str(folder)))
    golden(caught.value)
    assert caught.value.file == str(folder / "model.ckpt-9")


def test_a_v2_checkpoint_of_the_same_name_goes_first(folder: Path) -> None:
    v1.W["bundle"](folder / "model.ckpt-9", {"w": ONE})
    (folder / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-9"')
    assert tf_v1.claims(Probe(str(folder))) is None
    assert tf_bundle.claims(Probe(str(folder))) == str(folder / "model.ckpt-9")
    assert tf_v1.claims(Probe(str(folder / "model.ckpt-9.index"))) is None


def test_folders_without_a_state_file(folder: Path, golden: Golden) -> None:
    with pytest.raises(UsageError) as caught:
        tf_v1.claims(Probe(str(folder)))
    golden(caught.value)
    assert str(caught.value.hint).endswith("model.ckpt-10-?????-of-00002?")
    (folder / "model.ckpt-9").unlink()
    assert claim(folder) == str(folder / "model.ckpt-10-?????-of-00002")


def test_a_folder_of_both_versions_names_no_latest(folder: Path, golden: Golden) -> None:
    v1.W["bundle"](folder / "model.ckpt-3", {"w": ONE})
    with pytest.raises(UsageError) as caught:
        tf_bundle.claims(Probe(str(folder)))
    golden(caught.value)
    assert str(caught.value.hint).endswith("model.ckpt-10-?????-of-00002?")
    assert tf_v1.claims(Probe(str(folder))) is None


def test_shards_of_two_checkpoints_with_one_prefix(folder: Path, golden: Golden) -> None:
    (folder / "model.ckpt-10-00000-of-00001").write_bytes(v1.vectors({"w": ONE}))
    with pytest.raises(UsageError) as caught:
        tf_v1.claims(Probe(str(folder / "model.ckpt-10")))
    golden(caught.value)
    assert claim(folder / "model.ckpt-10-00000-of-00001") == str(folder / "model.ckpt-10-?????-of-00001")


def test_a_missing_shard(folder: Path, golden: Golden) -> None:
    (folder / "model.ckpt-10-00000-of-00002").unlink()
    location = claim(folder / "model.ckpt-10")
    assert location is not None
    with pytest.raises(TruncatedError) as caught:
        tf_v1.read(location)
    golden(caught.value)
    assert str(caught.value.file).endswith("model.ckpt-10-00000-of-00002")


def test_a_v2_index_under_another_name(tmp_path: Path, golden: Golden) -> None:
    v1.W["bundle"](tmp_path / "m", {"w": ONE})
    (tmp_path / "m.index").rename(tmp_path / "m.ckpt")
    with pytest.raises(FormatError) as caught:
        open_checkpoint(str(tmp_path / "m.ckpt"))
    golden(caught.value)


# Large files.


def test_listing_reads_no_values(tmp_path: Path) -> None:
    path = tmp_path / "large"
    values = {"a": ONE, **{f"w{number:02d}": bytes(4_000_000) for number in range(16)}, "z": HALF}
    path.write_bytes(v1.vectors(values, per_block=1))
    # The first block of a file holds the list and what fits behind it.
    tracemalloc.start()
    listed = leaves(tf_v1.read(str(path)))
    assert list(listed) == list(values)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    for name in values:
        assert listed[name].read() == values[name]
    assert tracemalloc.get_traced_memory()[1] < 30_000_000
    tracemalloc.stop()


def test_small_values_beside_a_large_one_cost_their_own_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {f"b{number:03d}": ONE for number in range(300)} | {"w": bytes(4_000_000)}
    leaves = listed(tmp_path / "m", v1.vectors(values))
    leaves["b000"].read()
    lengths = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda d, n, at: lengths.append(n) or pread(d, n, at))
    for name in values:
        assert leaves[name].read() == values[name]
    assert sum(lengths) < 4_100_000


def test_a_file_that_changed_is_not_read_from_memory(tmp_path: Path) -> None:
    path = tmp_path / "m"
    metas = [meta(b"x", shape(1), 1, [FULL])]
    for data in (
        v1.vectors({"x": ONE}),
        v1.compressed([(b"", header(*metas)), entry(b"x", [FULL], floats(ONE))]),
    ):
        leaf = listed(path, data)["x"]
        assert leaf.read() == ONE
        os.utime(path, ns=(1, 1))
        with pytest.raises(ChangedError):
            leaf.read()


# Broken rules.

X = meta(b"x", shape(2), 1, [FULL])
GOOD = entry(b"x", [FULL], floats(ONE + HALF))
HUGE = 1 << 40


@pytest.mark.parametrize(
    "entries",
    [
        pytest.param([], id="no V1 checkpoint"),
        pytest.param([GOOD], id="no list of tensors"),
        pytest.param([(b"", b"\xff"), GOOD], id="cut off"),
        pytest.param([(b"", header(meta(b"x", shape(2), 99, [FULL]))), GOOD], id="type"),
        pytest.param([(b"", header(meta(b"x", shape(2), 14, [FULL]))), GOOD], id="bfloat16"),
        pytest.param([(b"", header(meta(b"x", shape(2), 1, [(0, 1)]))), GOOD], id="lacks a slice"),
        pytest.param([(b"", header(meta(b"x", shape(2), 1, [FULL], [FULL]))), GOOD], id="do not cover"),
        pytest.param([(b"", header(meta(b"x", shape(2), 1, [(0, 3)]))), GOOD], id="beyond its tensor"),
        pytest.param([(b"", header(meta(b"x", shape(2), 1, [(0, 1), (0, 1)]))), GOOD], id="another rank"),
        pytest.param([(b"", header(meta(b"x", shape(HUGE), 1, [FULL]))), GOOD], id="more elements"),
        pytest.param([(b"", header(meta(b"x", shape(HUGE, HUGE), 1, [FULL] * 2))), GOOD], id="more elements"),
        pytest.param(
            [(b"", header(meta(b"x", shape(HUGE, HUGE, 0), 1, [FULL] * 3))), GOOD], id="more elements"
        ),
        pytest.param([(b"", header(meta(b"x", shape(-1), 1, [FULL]))), GOOD], id="negative"),
        pytest.param([(b"", header(meta(b"x", field(3, 1), 1, []))), GOOD], id="unknown rank"),
        pytest.param([(b"", header(X, meta(b"x", shape(3), 1, [FULL]))), GOOD], id="disagree"),
        pytest.param([(b"", header(meta(b"y", shape(2), 1, [FULL]))), GOOD], id="lacks a slice"),
        pytest.param(
            [(b"", header(meta(b"x", shape(2), 1, []))), entry(b"x", [], floats(ONE + HALF))],
            id="another rank",
        ),
        pytest.param([(b"", header(X, version=b"\x08" + b"\xff" * 9 + b"\x01")), GOOD], id="negative"),
        pytest.param([(b"", header(X, version=b"\x08\x02\x10\x02")), GOOD], id="newer reader"),
        pytest.param([(b"", header(X, version=b"\x08\x02\x1a\x01\x01")), GOOD], id="newer reader"),
    ],
)
def test_lists_that_are_refused(tmp_path: Path, entries: list[tuple[bytes, bytes]], golden: Golden) -> None:
    with pytest.raises(CkpttoolError) as caught:
        listed(tmp_path / "m", table(entries) if entries else v1.table_of([], []))
    golden(caught.value)
    assert caught.value.file == str(tmp_path / "m")


def one(dtype: int, proto: bytes, elements: int = 1) -> bytes:
    head = header(meta(b"x", shape(elements), dtype, [FULL]))
    return table([(b"", head), entry(b"x", [FULL], proto)])


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(table([(b"", header(meta(b"a", shape(1), 1, [FULL]))), GOOD]), id="lacks an entry"),
        pytest.param(one(1, floats(ONE), 2), id="too few values"),
        pytest.param(one(1, floats(ONE * 3), 2), id="too many values"),
        pytest.param(one(3, field(7, b"\x80")), id="cut off"),
        pytest.param(one(3, field(7, b"\xff" * 9 + b"\x02")), id="64 bits"),
        pytest.param(one(9, field(10, b"\xff" * 10 + b"\x01")), id="64 bits"),
        pytest.param(one(3, field(7, 1 << 31)), id="does not fit into int32"),
        pytest.param(one(6, field(7, 200)), id="does not fit into int8"),
        pytest.param(one(4, field(7, -1)), id="does not fit into uint8"),
        pytest.param(one(10, field(11, 2)), id="does not fit into bool"),
        pytest.param(one(19, field(13, 1 << 16)), id="does not fit into float16"),
        pytest.param(one(7, field(8, 5)), id="number where a message"),
        pytest.param(one(1, field(5, 1 << 40)), id="another width"),
        pytest.param(one(1, b"\x2a\x7f"), id="longer than its message"),
    ],
)
def test_values_that_are_refused(tmp_path: Path, data: bytes, golden: Golden) -> None:
    leaf = next(iter(listed(tmp_path / "m", data).values()))
    with pytest.raises(FormatError) as caught:
        leaf.read()
    golden(caught.value)
    assert caught.value.file == str(tmp_path / "m")


@pytest.mark.parametrize(
    ("dtype", "proto", "right"),
    [
        (3, field(7, b"\x05" + b"\xff" * 9 + b"\x01" + b"\xac\x02"), np.int32([5, -1, 300])),
        (3, field(7, 5) + field(7, b"\xac\x02") + field(7, -1), np.int32([5, 300, -1])),
        (
            9,
            field(10, -(1 << 63)) + field(10, (1 << 63) - 1) + field(10, 0),
            np.int64([-1 << 63, (1 << 63) - 1, 0]),
        ),
        (23, field(17, (1 << 64) - 1) + field(17, b"\0\1"), np.uint64([(1 << 64) - 1, 0, 1])),
        (22, field(16, b"\xff\xff\xff\xff\x0f\0\1"), np.uint32([(1 << 32) - 1, 0, 1])),
        (10, field(11, b"\1\0\1"), np.bool_([True, False, True])),
    ],
)
def test_numbers_packed_and_not(tmp_path: Path, dtype: int, proto: bytes, right: np.ndarray) -> None:
    leaf = listed(tmp_path / "m", one(dtype, proto, 3))["x"]
    assert np.array_equal(leaf.array(), right)
    assert leaf.array().dtype == right.dtype


def test_slices_that_do_not_cover(tmp_path: Path, golden: Golden) -> None:
    for cuts in ([], [[(0, 1)]]):
        entries = [entry(b"x", cut, floats(ONE)) for cut in cuts] or [GOOD]
        leaves = listed(tmp_path / "m", table([(b"", header(meta(b"x", shape(2), 1, *cuts))), *entries]))
        with pytest.raises(FormatError) as caught:
            leaves["x"].read()
        golden(caught.value)


def test_a_string_in_slices_is_listed_only(tmp_path: Path, golden: Golden) -> None:
    cuts = [[(0, 1)], [(1, 1)]]
    entries = [entry(b"x", cut, field(8, b"text")) for cut in cuts]
    leaf = listed(tmp_path / "m", table([(b"", header(meta(b"x", shape(2), 7, *cuts))), *entries]))["x"]
    with pytest.raises(UnsupportedError) as caught:
        leaf.read()
    golden(caught.value)


def test_a_block_named_twice(tmp_path: Path, golden: Golden) -> None:
    contents = v1.block([(b"", header(X)), GOOD])
    handle = v1.varint(0) + v1.varint(len(contents))
    index = v1.block([(b"y", handle), (b"z", handle)], interval=1)
    out = v1.W["framed"](contents)
    handles = v1.varint(len(out)) + v1.varint(8)
    out += v1.W["framed"](v1.block([]))
    handles += v1.varint(len(out)) + v1.varint(len(index))
    out += v1.W["framed"](index) + handles.ljust(40, b"\0") + v1.W["MAGIC"]
    with pytest.raises(FormatError) as caught:
        listed(tmp_path / "m", out)
    golden(caught.value)


def test_a_damaged_block_of_values(tmp_path: Path, golden: Golden) -> None:
    path = tmp_path / "m"
    data = bytearray(v1.vectors(SIX, per_block=2))
    at = data.index(SIX["f"])
    data[at] ^= 1
    leaves = listed(path, bytes(data))
    assert leaves["a"].read() == SIX["a"]
    with pytest.raises(ChecksumError) as caught:
        leaves["f"].read()
    golden(caught.value)
    assert 0 < (caught.value.offset or 0) < at


def test_no_damage_escapes_the_family_of_errors(tmp_path: Path) -> None:
    # Checksums are made right again, so that what lies behind them is tried.
    generator = random.Random(0)
    dims = [(0, 2), FULL]
    metas = [meta(b"x", shape(4, 3), 3, dims, [(2, 2), FULL]), meta(b"y", shape(2), 7, [FULL])]
    entries = [
        (b"", header(*metas)),
        entry(b"x", dims, field(7, bytes(range(6)))),
        entry(b"x", [(2, 2), FULL], field(7, b"\xac\x02" * 6)),
        entry(b"y", [FULL], field(8, b"one") + field(8, b"two")),
    ]
    right = digest(tmp_path / "right", table(entries))
    outcomes = set()
    for _ in range(300):
        damaged = [list(pair) for pair in entries]
        chosen = generator.choice(damaged)
        part = generator.randrange(2) if chosen[0] else 1
        data = bytearray(chosen[part])
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        chosen[part] = bytes(data)
        try:
            outcomes.add(digest(tmp_path / "m", table(sorted(map(tuple, damaged)))) == right)
        except CkpttoolError:
            outcomes.add(None)
    assert outcomes == {True, False, None}


def test_every_truncation(tmp_path: Path) -> None:
    whole = v1.vectors(SIX, per_block=2)
    for length in range(len(whole)):
        with pytest.raises(CkpttoolError):
            digest(tmp_path / "m", whole[:length])


def digest(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return digest_checkpoint(tf_v1.read(str(path))).sha256
