"""TensorFlow checkpoints: what TensorFlow reads of them, which path means which, every broken rule."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import os
import pickle
import random
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import cramjam
import numpy as np
import pytest

from ckpttool.core import (
    ChangedError,
    Checkpoint,
    CkpttoolError,
    Container,
    FormatError,
    Leaf,
    LimitError,
    NotFoundError,
    TruncatedError,
    UnsupportedError,
    UsageError,
    display,
    limits,
)
from ckpttool.formats import Probe, tf_bundle
from tests.golden_texts import Golden

W = runpy.run_path(str(Path(__file__).with_name("bundle_writer.py")))
run = runpy.run_path(str(Path(__file__).with_name("tensorflow_child.py")))["run"]
entry, field, header, masked, shape, strings, table = (
    W[name] for name in ("entry", "field", "header", "masked", "shape", "strings", "table")
)
CORPUS = Path(__file__).parents[2] / "shared" / "corpus" / "tf"
TYPES = [
    *("float16", "float32", "float64", "bfloat16", "float8_e5m2", "float8_e4m3fn", "complex64", "complex128"),
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
]
without_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)


def sha256(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()


def leaves(checkpoint: Checkpoint) -> dict[str, Leaf]:
    return {leaf.key: leaf for _, leaf in checkpoint.tree.tensors()}


# Checkpoints by TensorFlow. These functions run in a child process.


def build(folder: Path) -> dict[str, Any]:
    """Save checkpoints of every kind; return what TensorFlow reads of each."""
    import tensorflow as tf

    _save_types(folder)
    _save_many(folder)
    _save_cut(folder)
    _save_slots(folder)
    _save_by_name(folder)
    return {name: _facts(tf, folder / name) for name in ("types", "many", "cut", "slots", "by_name")}


def _facts(tf: Any, prefix: Path) -> dict[str, Any]:
    reader = tf.train.load_checkpoint(str(prefix))
    facts, dtypes = {}, reader.get_variable_to_dtype_map()
    for key, dims in reader.get_variable_to_shape_map().items():
        dtype = dtypes[key]
        if key == "_CHECKPOINTABLE_OBJECT_GRAPH":
            continue
        fact: dict[str, Any] = {"dtype": dtype.name, "shape": dims}
        if dtype == tf.string:
            values = np.asarray(reader.get_tensor(key), dtype=object).reshape(-1).tolist()
            fact["strings"] = [value.decode("latin-1") for value in values]
        elif dtype != tf.variant:
            fact["sha256"] = sha256(np.ascontiguousarray(reader.get_tensor(key)).tobytes())
        facts[key] = fact
    return facts


def _save_types(folder: Path) -> None:
    import tensorflow as tf

    root = tf.train.Checkpoint()
    values = [0.0, 1.0, 2.0, 3.0, 1.0, 0.0]
    for name in TYPES:
        setattr(root, name, tf.Variable(tf.cast(tf.constant(values, shape=[2, 3]), name)))
    root.text = tf.Variable([[b"", b"a"], [b"\xff\x00" * 200, "\u00fc".encode()]])
    root.one_text = tf.Variable(b"x" * 70_000)
    root.no_text = tf.Variable(tf.zeros([0, 2], tf.string))
    root.scalar = tf.Variable(2.5)
    root.empty = tf.Variable(tf.zeros([3, 0, 2]))
    root.deep = tf.Variable(tf.zeros([1] * 12))
    root.d = {"a/b.c": tf.Variable([7.0]), "plain": [tf.Variable([8.0])]}
    root.generator = tf.random.Generator.from_seed(3)
    root.table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
    root.table.insert(["x", "yy"], [1, 2])
    root.dataset = iter(tf.data.Dataset.range(10).shuffle(3))
    next(root.dataset)
    root.replay_buffer = tf.Module()
    root.replay_buffer.storage = tf.Variable(tf.zeros([10, 3]))
    root.write(str(folder / "types"))


def _save_many(folder: Path) -> None:
    import tensorflow as tf

    root = tf.Module()
    root.blocks = [tf.Module() for _ in range(7)]
    for block in root.blocks:
        for number in range(100):
            setattr(block, f"v{number}_{'a_rather_long_name' * 20}", tf.Variable(float(number)))
    tf.train.Checkpoint(root=root).write(str(folder / "many"))


def _save_cut(folder: Path) -> None:
    import tensorflow as tf

    root = tf.train.Checkpoint(
        a=tf.Variable(tf.reshape(tf.range(200, dtype=tf.float32), [10, 20])),
        b=tf.Variable(tf.cast(tf.reshape(tf.range(192), [2, 3, 32]), tf.int16)),
        c=tf.Variable(1.0),
    )
    policy = tf.train.experimental.MaxShardSizePolicy(max_shard_size=256)
    options = tf.train.CheckpointOptions(experimental_sharding_callback=policy)
    root.write(str(folder / "cut"), options=options)


def _save_slots(folder: Path) -> None:
    import tensorflow as tf

    root = tf.train.Checkpoint(
        w=tf.Variable([1.0, 2.0]), b=tf.Variable(3.0), optimizer=tf.compat.v1.train.AdamOptimizer(0.1)
    )
    root.optimizer.minimize(lambda: tf.reduce_sum(root.w) * root.b, var_list=[root.w, root.b])
    root.write(str(folder / "slots"))


def _save_by_name(folder: Path) -> None:
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        with v1.variable_scope("scope", partitioner=v1.fixed_size_partitioner(3)):
            v1.get_variable("w", initializer=tf.reshape(tf.range(40, dtype=tf.float32), [10, 4]))
        v1.get_variable("scope/b", initializer=tf.ones([4]))
        v1.train.get_or_create_global_step()
        session.run(v1.global_variables_initializer())
        v1.train.Saver().save(session, str(folder / "by_name"), write_meta_graph=False)


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("bundles")
    return folder, run(__file__, "build", folder)


@pytest.mark.tensorflow
@without_tensorflow
@pytest.mark.parametrize("name", ["types", "many", "cut", "slots", "by_name"])
def test_what_tensorflow_reads(written: tuple[Path, dict[str, Any]], name: str) -> None:
    folder, facts = written
    checkpoint = tf_bundle.read(str(folder / name))
    assert checkpoint.notes == ()
    listed = leaves(checkpoint)
    assert listed.keys() == facts[name].keys()
    for key, fact in facts[name].items():
        leaf = pickle.loads(pickle.dumps(listed[key]))
        assert (leaf.dtype, list(leaf.shape)) == (fact["dtype"], fact["shape"])
        data = leaf.read()
        if "strings" in fact:
            assert [text.decode("latin-1") for text in leaf.strings()] == fact["strings"]
        elif "sha256" in fact:
            assert sha256(data) == fact["sha256"], key


@pytest.mark.tensorflow
@without_tensorflow
def test_roles_by_name_and_type(written: tuple[Path, dict[str, Any]]) -> None:
    tree = tf_bundle.read(str(written[0] / "types")).tree
    by_path = {tuple(str(key.value) for key in path): leaf for path, leaf in tree.tensors()}
    roles = {"/".join(path): leaf.role for path, leaf in by_path.items()}
    assert roles["float32"] == roles["scalar"] == "parameter"
    assert roles["replay_buffer/storage"] == "replay"
    assert roles["generator/_state_var"] == "other"
    assert {role for path, role in roles.items() if path.startswith(("table", "dataset", "text"))} == {
        "other"
    }
    assert [path for path in roles if path.startswith("dataset")] == ["dataset/ITERATOR_STATE"]
    assert sorted(path for path in roles if path.startswith("table")) == [
        "table/table-keys",
        "table/table-values",
    ]
    assert ("d", "a/b.c") in by_path
    assert by_path["d", "a/b.c"].key == "d/a.Sb..c/.ATTRIBUTES/VARIABLE_VALUE"


def test_a_slice_of_no_tensor_is_a_tensor(tmp_path: Path) -> None:
    data = np.arange(2, dtype="f4").tobytes()
    index = table([(b"", header()), (b"\0a", entry(1, shape(2), 0, len(data), masked(data)))])
    (tmp_path / "x.index").write_bytes(index)
    (tmp_path / "x.data-00000-of-00001").write_bytes(data)
    checkpoint = tf_bundle.read(str(tmp_path / "x"))
    assert [leaf.key for _, leaf in checkpoint.tree.tensors()] == ["\0a"]


@pytest.mark.tensorflow
@without_tensorflow
def test_more_than_one_block(written: tuple[Path, dict[str, Any]]) -> None:
    folder, facts = written
    assert (folder / "many.index").stat().st_size > 262_144
    assert len(leaves(tf_bundle.read(str(folder / "many")))) == len(facts["many"]) == 700


@pytest.mark.tensorflow
@without_tensorflow
def test_slots_of_version_1_optimizers(written: tuple[Path, dict[str, Any]]) -> None:
    tree = tf_bundle.read(str(written[0] / "slots")).tree
    roles = {
        "/".join(str(key.value) for key in path): (leaf.role, leaf.slot, leaf.of and leaf.of[0].value)
        for path, leaf in tree.tensors()
    }
    assert roles == {
        "w": ("parameter", None, None),
        "b": ("parameter", None, None),
        "optimizer/beta1_power": ("other", None, None),
        "optimizer/beta2_power": ("other", None, None),
        **{f"optimizer/slots/{slot}/{of}": ("slot", slot, of) for slot in "mv" for of in "wb"},
    }


@pytest.mark.tensorflow
@without_tensorflow
def test_bit_flips_in_tensorflows_files(written: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    dice = random.Random(3)
    for name in ("types", "cut"):
        right = _content(tf_bundle.read(str(written[0] / name)))
        for file in sorted(written[0].glob(f"{name}.*")):
            for other in written[0].glob(f"{name}.*"):
                (tmp_path / other.name).write_bytes(other.read_bytes())
            seed = file.read_bytes()
            for _ in range(30):
                damaged = bytearray(seed)
                damaged[dice.randrange(len(seed))] ^= 1 << dice.randrange(8)
                (tmp_path / file.name).write_bytes(damaged)
                assert _content(tensor_bundle_or_error(str(tmp_path / name))).items() <= right.items()


def tensor_bundle_or_error(prefix: str) -> Checkpoint | None:
    try:
        return tf_bundle.read(prefix)
    except CkpttoolError:
        return None


def _content(checkpoint: Checkpoint | None) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """The content of what can be read; anything but our own errors escapes."""
    content = {}
    for key, leaf in {} if checkpoint is None else leaves(checkpoint).items():
        try:
            content[key] = leaf.dtype, leaf.shape, sha256(leaf.read())
        except CkpttoolError:
            continue
    return content


@pytest.mark.corpus
@pytest.mark.skipif(not CORPUS.is_dir(), reason="the shared corpus is not beside the project")
@pytest.mark.parametrize("kind", ["tf2_objgraph", "tf1_name_v2", "savedmodel"])
def test_golden_corpus(kind: str) -> None:
    checked = 0
    for truth in sorted((CORPUS / kind).rglob("*.truth.json")):
        prefix = str(truth)[: -len(".truth.json")]
        if Path(prefix).is_dir():
            prefix += "/variables/variables"
        if not Path(f"{prefix}.index").is_file():
            continue
        listed = leaves(tf_bundle.read(prefix))
        tensors = _tensors(json.loads(truth.read_text()))
        for key, fact in tensors.items():
            if key == "_CHECKPOINTABLE_OBJECT_GRAPH":
                assert key not in listed
                continue
            assert (listed[key].dtype, list(listed[key].shape)) == (fact["dtype"], fact["shape"])
            if fact["dtype"] != "string":
                assert sha256(listed[key].read()) == fact["sha256"]
                checked += 1
    assert checked


def _tensors(truth: Any) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for key, value in truth.items() if isinstance(truth, dict) else ():
        if isinstance(value, dict) and "dtype" in value and "shape" in value:
            tensors[key] = value
        elif isinstance(value, dict):
            tensors.update(_tensors(value))
    return tensors


# Which path means which checkpoint.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (1, 2):
        W["bundle"](tmp_path / f"ckpt-{step}", {"w": np.float32([step]).tobytes()})
    return tmp_path


def claim(path: Path | str) -> str | None:
    return tf_bundle.claims(Probe(str(path)))


def test_the_ways_to_name_a_checkpoint(folder: Path) -> None:
    prefix = str(folder / "ckpt-1")
    for path in (prefix, f"{prefix}.index", f"{prefix}.data-00000-of-00001"):
        assert claim(path) == prefix


@pytest.mark.parametrize(
    "line",
    [
        'model_checkpoint_path: "ckpt-1"',
        "model_checkpoint_path: 'ckpt-1'",
        '\n  model_checkpoint_path:"./ckpt-1"\nall_model_checkpoint_paths: "ckpt-2"\n',
        'all_model_checkpoint_paths: "ckpt-2"\nmodel_checkpoint_path: "ckpt-1"',
        'model_checkpoint_path: "/gone/runs/7/ckpt-1"',
        'model_checkpoint_path: "../other/ckpt-1"',
        'model_checkpoint_path: "\\143kpt-1"',
    ],
)
def test_state_files(folder: Path, line: str) -> None:
    (folder / "checkpoint").write_text(line)
    assert claim(folder) == claim(folder / "checkpoint") == str(folder / "ckpt-1")


def test_state_files_lead_nowhere_else(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, golden: Golden
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    W["bundle"](elsewhere / "secret", {"w": b"\0\0\0\0"})
    for path in (elsewhere / "secret", os.path.relpath(elsewhere / "secret", folder)):
        (folder / "checkpoint").write_text(f'model_checkpoint_path: "{path}"')
        with pytest.raises(NotFoundError) as caught:
            claim(folder)
        golden(str(caught.value).replace(str(path), "ELSEWHERE"))
        assert "ckpt-2" in str(caught.value.hint)


def test_state_file_without_a_latest(folder: Path) -> None:
    (folder / "checkpoint").write_text('all_model_checkpoint_paths: "ckpt-1"')
    with pytest.raises(FormatError):
        claim(folder)


def test_folders_without_a_state_file(folder: Path, golden: Golden) -> None:
    with pytest.raises(UsageError) as caught:
        claim(folder)
    golden(caught.value)
    (folder / "ckpt-1.index").unlink()
    assert claim(folder) == str(folder / "ckpt-2")


def test_paths_that_are_not_ours(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("model")
    (tmp_path / "faiss.index").write_text("not a table")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, *tmp_path.iterdir(), tmp_path / "missing"):
        assert claim(path) is None


def test_halves_of_a_checkpoint(folder: Path, golden: Golden) -> None:
    (folder / "ckpt-1.index").unlink()
    for path in (folder / "ckpt-1", folder / "ckpt-1.data-00000-of-00001"):
        with pytest.raises(TruncatedError) as caught:
            claim(path)
        golden(caught.value)


def test_version_1_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model.ckpt").write_bytes(table([(b"", b"")]))
    assert claim(tmp_path / "model.ckpt") is claim(tmp_path) is None


def test_missing_shard(folder: Path, golden: Golden) -> None:
    (folder / "ckpt-1.data-00000-of-00001").unlink()
    checkpoint = tf_bundle.read(str(folder / "ckpt-1"))
    golden(checkpoint.notes[0])
    with pytest.raises(TruncatedError) as caught:
        leaves(checkpoint)["w"].read()
    golden(caught.value)


def test_changed_and_truncated_shards(folder: Path, golden: Golden) -> None:
    leaf = leaves(tf_bundle.read(str(folder / "ckpt-1")))["w"]
    (folder / "ckpt-1.data-00000-of-00001").write_bytes(b"\0\0\0")
    with pytest.raises(ChangedError):
        leaf.read()
    with pytest.raises(TruncatedError) as caught:
        tf_bundle.read(str(folder / "ckpt-1"))
    golden(caught.value)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        pytest.param(b"", TruncatedError, id="empty"),
        pytest.param(
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", FormatError, id="Git LFS"
        ),
        pytest.param(b"<!DOCTYPE html>" * 20, FormatError, id="magic number"),
        pytest.param(table([]), FormatError, id="no header"),
        pytest.param(table([(b"a", b"")]), FormatError, id="no header"),
    ],
)
def test_index_files_that_are_none(
    folder: Path, content: bytes, error: type[Exception], golden: Golden
) -> None:
    (folder / "ckpt-1.index").write_bytes(content)
    assert claim(folder / "ckpt-1.index") is not None
    with pytest.raises(error) as caught:
        tf_bundle.read(str(folder / "ckpt-1"))
    golden(caught.value)
    assert caught.value.file == str(folder / "ckpt-1.index")


def test_special_files_are_not_opened(folder: Path, golden: Golden) -> None:
    for name in ("ckpt-1.data-00000-of-00001", "ckpt-1.index"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(FormatError) as caught:
            tf_bundle.read(str(folder / "ckpt-1"))
        golden(caught.value)


# Entries made by hand.

DATA = np.arange(4, dtype=np.float32).tobytes()
CRC = masked(DATA)


def crafted(folder: Path, entries: dict[bytes, bytes], data: bytes = DATA) -> Checkpoint:
    (folder / "x.data-00000-of-00001").write_bytes(data)
    (folder / "x.index").write_bytes(table(sorted({b"": header(), **entries}.items())))
    return tf_bundle.read(str(folder / "x"))


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (entry(0, shape(4), 0, 16, CRC), FormatError),
        (entry(99, shape(4), 0, 16, CRC), FormatError),
        (entry(101, shape(4), 0, 16, CRC), FormatError),
        (entry(20, shape(4), 0, 16, CRC), FormatError),
        (entry(29, shape(32), 0, 16, CRC), FormatError),
        (entry(33, shape(16), 0, 16, CRC), FormatError),
        (entry(1, shape(-4), 0, 16, CRC), FormatError),
        (entry(1, field(3, 1), 0, 16, CRC), FormatError),
        (entry(1, shape(*[1] * 300), 0, 4, CRC), FormatError),
        (entry(1, shape(*[1] * 65), 0, 4, CRC), UnsupportedError),
        (entry(1, shape(1 << 62, 1 << 62), 0, 16, CRC), FormatError),
        (entry(1, shape(1 << 62, 1 << 62, 0), 0, 0, CRC), FormatError),
        (entry(1, shape(1 << 40), 0, 16, CRC), FormatError),
        (entry(1, shape(1 << 40), 0, 1 << 42, CRC), TruncatedError),
        (entry(1, shape(5), 0, 16, CRC), FormatError),
        (entry(1, shape(3), 0, 16, CRC), FormatError),
        (entry(1, shape(4), 0, -16, CRC), FormatError),
        (entry(1, shape(4), -1, 16, CRC), FormatError),
        (entry(1, shape(4), 1, 16, CRC), TruncatedError),
        (entry(1, shape(4), (1 << 63) - 1, 16, CRC), TruncatedError),
        (entry(1, shape(4), 0, 16, CRC, shard=1), FormatError),
        (entry(1, shape(4), 0, 16, CRC, shard=-1), FormatError),
        (entry(1, shape(4), 0, 16, CRC, shard=(1 << 31) - 1), FormatError),
        (entry(7, shape(1 << 28), 0, 16, CRC), FormatError),
        (b"\xff" * 12, FormatError),
        (b"\x0b" * 5000 + b"\x0c" * 5000, FormatError),
        (field(2, 7), FormatError),
        (field(3, b"abc"), FormatError),
    ],
)
def test_broken_entries(tmp_path: Path, bad: bytes, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        crafted(tmp_path, {b"bad/name": bad})
    assert caught.value.path == "bad/name"
    assert caught.value.file == str(tmp_path / "x.index")


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (b"", FormatError),
        (header(0), FormatError),
        (header(-1), FormatError),
        (header(2), None),  # shard 0 of 2 is not there: listed, not read
        (header((1 << 31) - 1), None),
        (header(version=field(1, 9) + field(2, 2)), UnsupportedError),
        (header(version=field(1, 1) + field(3, 1)), UnsupportedError),
        (header(version=field(1, 1) + field(3, b"\x05\x01")), UnsupportedError),
        (field(1, 1) + field(2, 2), FormatError),
        (b"\xff" * 11, FormatError),
    ],
)
def test_headers(tmp_path: Path, bad: bytes, error: type[Exception] | None) -> None:
    entries = {b"": bad, b"w": entry(1, shape(4), 0, 16, CRC)}
    if error is None:
        assert crafted(tmp_path, entries).notes
        return
    with pytest.raises(error):
        crafted(tmp_path, entries)


def test_checksums(tmp_path: Path, golden: Golden) -> None:
    for crc in (b"\0\0\0\0", masked(b"other")):
        leaf = leaves(crafted(tmp_path, {b"w": entry(1, shape(4), 0, 16, crc)}))["w"]
        with pytest.raises(FormatError) as caught:
            leaf.read()
        golden(caught.value)


@pytest.mark.parametrize(
    ("number", "dtype"), [(1, ">f4"), (19, ">f2"), (9, ">i8"), (8, ">c8"), (4, "u1"), (10, "?")]
)
def test_big_endian(tmp_path: Path, number: int, dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    if array.dtype.kind == "c":
        array = (array + 1j).astype(dtype)
    data = array.tobytes()
    entries = {b"": header(big=True), b"w": entry(number, shape(2, 3), 0, len(data), masked(data))}
    leaf = leaves(crafted(tmp_path, entries, data))["w"]
    np.testing.assert_array_equal(leaf.array(), array)


def test_strings(tmp_path: Path) -> None:
    values = [b"", b"abc", b"\0" * 300]
    data, crc = strings(*values)
    leaf = leaves(crafted(tmp_path, {b"s": entry(7, shape(3), 0, len(data), crc)}, data))["s"]
    assert leaf.strings() == values
    assert (leaf.dtype, leaf.shape) == ("string", (3,))
    for bit in [*range(100), *range(100, 8 * len(data), 37)]:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        leaf = leaves(crafted(tmp_path, {b"s": entry(7, shape(3), 0, len(data), crc)}, bytes(damaged)))["s"]
        with pytest.raises(FormatError):
            leaf.read()


@pytest.mark.parametrize("lengths", [b"\xff" * 11, b"\x80\x80\x80\x80\x80\x20", b"\x80" * 6, b"\x05"])
def test_string_lengths_that_lie(tmp_path: Path, lengths: bytes) -> None:
    data = lengths + masked(b"") + b"abc"
    leaf = leaves(crafted(tmp_path, {b"s": entry(7, b"", 0, len(data), masked(data))}, data))["s"]
    with pytest.raises(FormatError):
        leaf.read()


def sliced(*extents: tuple[tuple[int, int | None], ...]) -> bytes:
    """The `slices` of an entry; a length of None is left out."""
    out = b""
    for box in extents:
        parts = [
            (field(1, start) if start else b"") + (b"" if length is None else field(2, length))
            for start, length in box
        ]
        out += field(7, b"".join(field(1, part) for part in parts))
    return out


@pytest.mark.parametrize(
    ("number", "name", "low"), [(29, "int4", -8), (30, "uint4", 0), (31, "int2", -2), (32, "uint2", 0)]
)
def test_types_below_a_byte_take_one(
    tmp_path: Path, number: int, name: str, low: int, golden: Golden
) -> None:
    # tensorflow/core/framework/types.proto; TensorFlow's own files are in test_tensorflow_reads.
    bits = int(name[-1])
    data = bytes((low + n) % (1 << bits) for n in range(1 << bits))
    (leaf,) = leaves(
        crafted(tmp_path, {b"w": entry(number, shape(len(data)), 0, len(data), masked(data))}, data)
    ).values()
    assert (leaf.dtype, leaf.read(), leaf.nbytes) == (name, data, len(data))
    assert leaf.array().astype(int).tolist() == list(range(low, low + len(data)))
    packed = entry(number, shape(len(data)), 0, len(data) // 2, masked(data[: len(data) // 2]))
    with pytest.raises(FormatError) as caught:
        crafted(tmp_path, {b"w": packed}, data)
    golden(caught.value)


def test_compressed_blocks(folder: Path) -> None:
    plain = table(sorted({b"": header(), b"w": entry(1, shape(1), 0, 4, masked(DATA[:4]))}.items()))
    contents = W["block"]([(b"", header()), (b"w", entry(1, shape(1), 0, 4, masked(DATA[:4])))])
    compressed = bytes(cramjam.snappy.compress_raw(contents))
    (folder / "ckpt-1.index").write_bytes(W["table_of"]([compressed], [b"w"], kind=1))
    (folder / "ckpt-1.data-00000-of-00001").write_bytes(DATA[:4])
    listed = leaves(tf_bundle.read(str(folder / "ckpt-1")))
    (folder / "ckpt-1.index").write_bytes(plain)
    assert leaves(tf_bundle.read(str(folder / "ckpt-1")))["w"].read() == listed["w"].read() == DATA[:4]


def halves(first: bytes, second: bytes) -> dict[bytes, bytes]:
    # Rows 0 to 2 and 2 to 4 of w [4, 2]; the keys as FORMATS of tensorflow/core/lib/strings/ordered_code.cc.
    whole = entry(1, shape(4, 2), 0, 0, b"\0" * 4, more=sliced(((0, 2), (0, None)), ((2, 2), (0, None))))
    return {b"w": whole, b"\0w\0\1\1\2\x80\x82\x80\x7f": first, b"\0w\0\1\1\2\x82\x82\x80\x7f": second}


def test_slices(tmp_path: Path) -> None:
    data = np.arange(8, dtype=np.float32).tobytes()
    first = entry(1, shape(2, 2), 16, 16, masked(data[16:]))
    second = entry(1, shape(2, 2), 0, 16, masked(data[:16]))
    listed = leaves(crafted(tmp_path, halves(first, second), data))
    assert listed.keys() == {"w"}
    assert listed["w"].array().tolist() == [[4, 5], [6, 7], [0, 1], [2, 3]]


@pytest.mark.parametrize("rows", [4, 5])
def test_a_tensor_without_all_of_its_slices_is_listed_only(tmp_path: Path, rows: int, golden: Golden) -> None:
    data = np.arange(8, dtype=np.float32).tobytes()
    part = entry(1, shape(2, 2), 0, 16, masked(data[:16]))
    whole = entry(1, shape(rows, 2), 0, 0, b"\0" * 4, more=sliced(((0, 2), (0, None))))
    listed = leaves(crafted(tmp_path, {**halves(part, part), b"w": whole}, data))
    with pytest.raises(FormatError) as caught:
        listed["w"].read()
    golden(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda e: e.pop(b"\0w\0\1\1\2\x82\x82\x80\x7f"),
        lambda e: e.update({b"w": entry(1, shape(4, 2), 0, 0, b"\0" * 4, more=sliced(((0, 2),)))}),
        lambda e: e.update({b"w": entry(2, shape(4, 2), 0, 0, b"\0" * 4, more=sliced(((0, 2), (0, None))))}),
        lambda e: e.update({b"w": e[b"w"] + sliced(((0, 2), (0, None)))}),
    ],
)
def test_slices_that_do_not_fit(tmp_path: Path, change: Any) -> None:
    data = np.arange(8, dtype=np.float32).tobytes()
    part = entry(1, shape(2, 2), 0, 16, masked(data[:16]))
    entries = copy.copy(halves(part, part))
    change(entries)
    with pytest.raises(FormatError):
        crafted(tmp_path, entries, data)


def test_the_object_graph_must_be_one_sound_string(tmp_path: Path) -> None:
    key = b"_CHECKPOINTABLE_OBJECT_GRAPH"
    data, crc = strings(b"\xff\xff")
    for bad in (
        entry(1, shape(4), 0, 16, CRC),
        entry(7, shape(1), 0, len(data), crc),
        entry(7, b"", 0, len(data), b"\0" * 4),
        entry(7, b"", 0, len(data), crc),
    ):
        with pytest.raises(FormatError) as caught:
            crafted(tmp_path, {key: bad}, data.ljust(16, b"\0"))
        assert caught.value.file is not None


def test_an_object_graph_of_any_size_is_not_read(tmp_path: Path, golden: Golden) -> None:
    # 16 GiB in a file that is a hole.
    with (tmp_path / "x.data-00000-of-00001").open("wb") as stream:
        stream.truncate(16 << 30)
    graph = entry(7, b"", 0, 16 << 30, b"\0" * 4)
    entries = {b"": header(), b"_CHECKPOINTABLE_OBJECT_GRAPH": graph}
    (tmp_path / "x.index").write_bytes(table(sorted(entries.items())))
    with pytest.raises(LimitError) as caught:
        tf_bundle.read(str(tmp_path / "x"))
    golden(caught.value)


# Configurations, as TensorFlow 1.13 writes them (tensorflow/python/training/checkpointable/base.py,
# Checkpointable._gather_saveables_for_checkpoint).

DENSE = {
    "class_name": "Dense",
    "config": {
        "name": "hidden",
        "units": 4,
        "activation": "relu",
        "use_bias": True,
        "batch_input_shape": [None, 3],
        "kernel_regularizer": None,
        "bias_initializer": {"class_name": "Zeros", "config": {"dtype": "float32"}},
    },
}
NORM = {"class_name": "BatchNormalizationV1", "config": {"name": "bn", "axis": [1], "epsilon": 0.001}}
LAMBDA = {"class_name": "Lambda", "config": {"name": "l", "function": ["4wEAAAA" * 100, None, None]}}


LONG = 200_000


def with_configs(folder: Path, *configs: bytes) -> Checkpoint:
    """A bundle with one layer for each configuration, each with a kernel."""
    data, entries = bytearray(), {}
    children, nodes = [], []
    for number, config in enumerate(configs):
        stored, crc = strings(config)
        own = f"l{number}/.ATTRIBUTES/OBJECT_CONFIG_JSON"
        kernel = f"l{number}/kernel/.ATTRIBUTES/VARIABLE_VALUE"
        entries[own.encode()] = entry(7, b"", len(data), len(stored), crc)
        entries[kernel.encode()] = entry(1, shape(4), len(data) + len(stored), 16, CRC)
        data += stored + DATA
        children.append((f"l{number}", 1 + 2 * number))
        nodes.append(W["node"]([("kernel", 2 + 2 * number)], [("OBJECT_CONFIG_JSON", "", own)]))
        nodes.append(W["variable"](kernel.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE")))
    stored, crc = strings(W["graph"](W["node"](children), *nodes))
    entries[b"_CHECKPOINTABLE_OBJECT_GRAPH"] = entry(7, b"", len(data), len(stored), crc)
    return crafted(folder, entries, bytes(data + stored))


def test_configurations_of_layers(tmp_path: Path) -> None:
    configs = [json.dumps(config, sort_keys=True).encode() for config in (DENSE, NORM, LAMBDA)]
    checkpoint = with_configs(tmp_path, *configs)
    assert checkpoint.notes == ()
    containers = {display(path): container for path, container in checkpoint.tree.containers.items()}
    facts = {"layer": "hidden", "units": 4, "activation": "relu", "use_bias": True}
    facts |= {"batch_input_shape": [None, 3], "bias_initializer": "Zeros"}
    assert containers["l0"] == Container("module", "Dense", facts)
    assert containers["l1"] == Container(
        "module", "BatchNormalizationV1", {"layer": "bn", "axis": [1], "epsilon": 0.001}
    )
    assert containers["l2"] == Container("module", "Lambda", {"layer": "l"})
    config = leaves(checkpoint)["l0/.ATTRIBUTES/OBJECT_CONFIG_JSON"]
    assert (config.role, config.strings()) == ("other", [configs[0]])
    roles = [leaf.role for _, leaf in checkpoint.tree.tensors()]
    assert sorted(roles) == ["other"] * 3 + ["parameter"] * 3


@pytest.mark.parametrize(
    "config",
    [
        b"",
        b"\xff",
        b"{",
        b"[" * 100_000,
        b"9" * 100_000,
        b'{"class_name": ' + b"9" * 5000 + b"}",
        b"[1]",
        b'"Dense"',
        b'{"class_name": "Dense", "config": {}}'.ljust(LONG + 1),
    ],
)
def test_configurations_that_are_none(tmp_path: Path, config: bytes) -> None:
    with limits.using(replace(limits.Limits(), json_bytes=LONG)):
        checkpoint = with_configs(tmp_path, config, json.dumps(NORM).encode())
    assert [display(path) for path in checkpoint.tree.containers] == ["l1"]
    (note,) = checkpoint.notes
    assert note.startswith("l0/.ATTRIBUTES/OBJECT_CONFIG_JSON: ")


@pytest.mark.parametrize(
    "config",
    [b"{}", b'{"class_name": 7, "config": {}}', b'{"class_name": "Dense", "config": [1]}', b'{"config": {}}'],
)
def test_configurations_without_a_class(tmp_path: Path, config: bytes) -> None:
    checkpoint = with_configs(tmp_path, config)
    assert (checkpoint.notes, checkpoint.tree.containers) == ((), {})


def test_a_damaged_configuration_is_passed_over(tmp_path: Path) -> None:
    with_configs(tmp_path, json.dumps(DENSE).encode())
    shard = tmp_path / "x.data-00000-of-00001"
    shard.write_bytes(shard.read_bytes().replace(b"hidden", b"hidded"))
    checkpoint = tf_bundle.read(str(tmp_path / "x"))
    assert len(checkpoint.notes) == 1
    assert len(checkpoint.tree) == 2


def test_damage_under_sound_checksums(tmp_path: Path) -> None:
    """Whatever a record says, it is read or refused by an error of ours."""
    node, graph, variable = W["node"], W["graph"], W["variable"]
    optimizer = node([("_iterations", 2), ("_variables", 3), ("_momentums", 3)], slots=[(4, "m", 5)])
    names = graph(
        node([("net", 4), ("opt", 1)]), optimizer, *map(variable, "i"), node([("0", 5)]), *map(variable, "wm")
    )
    text, crc = strings(b"abc", b"")
    seeds = {
        b"": header(),
        b"i/.ATTRIBUTES/VARIABLE_VALUE": entry(9, b"", 0, 8, masked(DATA[:8])),
        b"s": entry(7, shape(2), 16, len(text), crc),
        **halves(entry(1, shape(2, 2), 0, 16, CRC), entry(1, shape(2, 2), 0, 16, CRC)),
    }
    dice = random.Random(4)
    for _ in range(400):
        records = {key: bytearray(value) for key, value in seeds.items()}
        records[b"graph"] = bytearray(names)
        damaged = records[dice.choice(list(records))]
        for _ in range(dice.randint(1, 3)):
            damaged[dice.randrange(len(damaged))] = dice.choice([0, 1, 0x7F, 0x80, 0xFF, dice.randrange(256)])
        stored, own = strings(bytes(records.pop(b"graph")))
        records[b"_CHECKPOINTABLE_OBJECT_GRAPH"] = entry(7, b"", 16 + len(text), len(stored), own)
        try:
            checkpoint = crafted(tmp_path, {k: bytes(v) for k, v in records.items()}, DATA + text + stored)
        except CkpttoolError:
            continue
        _content(checkpoint)


def test_the_record(folder: Path, golden: Golden) -> None:
    checkpoint = tf_bundle.read(str(folder / "ckpt-2"))
    assert (checkpoint.format, checkpoint.integrity) == ("tensor_bundle", "crc32c")
    assert [Path(file.path).name for file in checkpoint.files] == [
        "ckpt-2.index",
        "ckpt-2.data-00000-of-00001",
    ]
    golden(checkpoint.writer)
