"""Writes V1 checkpoints: byte by byte as a test asks for, and by TensorFlow in a child process."""

from __future__ import annotations

import hashlib
import runpy
from pathlib import Path
from typing import Any

W = runpy.run_path(str(Path(__file__).with_name("bundle_writer.py")))
block, field, shape, table, table_of, varint = (
    W[name] for name in ("block", "field", "shape", "table", "table_of", "varint")
)

FULL = (0, -1)
# numpy name -> TensorFlow's number, for every type that TensorFlow saves in this form.
TYPES = {
    "float32": 1,
    "float64": 2,
    "int32": 3,
    "uint8": 4,
    "int16": 5,
    "int8": 6,
    "string": 7,
    "complex64": 8,
    "int64": 9,
    "bool": 10,
    "qint8": 11,
    "quint8": 12,
    "qint32": 13,
    "uint16": 17,
    "complex128": 18,
    "float16": 19,
}


def signed(value: int) -> bytes:
    """One number of a slice's key, for -64 to 8191."""
    return bytes([value + 0x80]) if -64 <= value < 64 else (0xC000 + value).to_bytes(2, "big")


def slice_key(name: bytes, extents) -> bytes:
    rank = bytes([1, len(extents)]) if extents else b"\0"
    return b"\0" + name + b"\0\1" + rank + b"".join(signed(a) + signed(n) for a, n in extents)


def extents_proto(extents) -> bytes:
    full = b""
    return b"".join(
        field(1, full if (a, n) == FULL else (field(1, a) if a else b"") + field(2, n)) for a, n in extents
    )


def meta(name: bytes, dims: bytes, dtype: int, *slices) -> bytes:
    cuts = b"".join(field(4, extents_proto(cut)) for cut in slices)
    return field(1, name) + field(2, dims) + field(3, dtype) + cuts


def header(*metas: bytes, version: bytes = b"\x08\x01") -> bytes:
    return field(1, b"".join(field(1, one) for one in metas) + field(2, version))


def value(name: bytes, extents, proto: bytes) -> bytes:
    return field(2, field(1, name) + field(2, extents_proto(extents)) + field(3, proto))


def entry(name: bytes, extents, proto: bytes) -> tuple[bytes, bytes]:
    return slice_key(name, extents), value(name, extents, proto)


def floats(*runs: bytes) -> bytes:
    """A TensorProto with packed floats, a field for every run."""
    return b"".join(field(5, run) for run in runs)


def vectors(values: dict[str, bytes], **options: Any) -> bytes:
    """A whole file of float32 vectors."""
    metas = [meta(n.encode(), shape(len(v) // 4), 1, [FULL]) for n, v in values.items()]
    entries = [entry(n.encode(), [FULL], floats(v)) for n, v in values.items()]
    return table(sorted([(b"", header(*metas)), *entries]), **options)


def compressed(entries) -> bytes:
    """A table with one snappy block for every four entries."""
    import cramjam

    entries = sorted(entries)
    chunks = [entries[at : at + 4] for at in range(0, len(entries), 4)]
    blocks = [bytes(cramjam.snappy.compress_raw(block(chunk))) for chunk in chunks]
    out, index = bytearray(), []
    for contents, chunk in zip(blocks, chunks, strict=True):
        index.append((chunk[-1][0], varint(len(out)) + varint(len(contents))))
        out += W["framed"](contents, 1)
    handles = varint(len(out)) + varint(8)
    out += W["framed"](block([]))
    contents = block(index, interval=1)
    handles += varint(len(out)) + varint(len(contents))
    return bytes(out) + W["framed"](contents) + handles.ljust(40, b"\0") + W["MAGIC"]


ONE = b"\0\0\x80?"
HALF = b"\0\0\0?"

# A tensor `x` of two floats and the TensorProto that holds it, right or wrong.
PROTOS = {
    "packed": floats(ONE + HALF),
    "two_runs": floats(ONE, HALF),
    "unpacked": varint(5 << 3 | 5) + ONE + varint(5 << 3 | 5) + HALF,
    "mixed": varint(5 << 3 | 5) + ONE + floats(HALF),
    "with_type_and_shape": field(1, 1) + field(2, shape(2)) + floats(ONE + HALF),
    "another_shape": field(1, 9) + field(2, shape(7, 7)) + floats(ONE + HALF),
    "repeated_last": floats(ONE),
    "too_many": floats(ONE + HALF + ONE),
    "content": field(1, 1) + field(2, shape(2)) + field(4, ONE + HALF),
    "another_field": field(6, ONE + HALF),
    "nothing": b"",
}


# These functions run in a child process.


def build(folder: Path) -> dict[str, Any]:
    """Save V1 and V2 checkpoints of every kind; return what TensorFlow reads of each."""
    import tensorflow as tf

    facts = {"types": _save_types(tf, folder), "random": _save_random(tf, folder)}
    facts |= _save_graph(tf, folder)
    facts["cuts"] = _save_cuts(tf, folder)
    verdicts = {}
    for name, proto in PROTOS.items():
        path = folder / f"proto_{name}"
        path.write_bytes(table([(b"", header(meta(b"x", shape(2), 1, [FULL]))), entry(b"x", [FULL], proto)]))
        verdicts[name] = _restored(tf, path, "x", 1)
    facts["protos"] = verdicts
    names = [f"w{number:02d}".encode() for number in range(20)]
    entries = [entry(name, [FULL], floats(ONE * 100 + HALF)) for name in names]
    metas = [meta(name, shape(101), 1, [FULL]) for name in names]
    (folder / "snappy").write_bytes(compressed([(b"", header(*metas)), *entries]))
    facts["snappy"] = _facts(tf, folder / "snappy")
    return facts


def _restored(tf: Any, path: Path, name: str, dtype: int) -> Any:
    import numpy as np

    try:
        restored = tf.raw_ops.Restore(file_pattern=str(path), tensor_name=name, dt=dtype)
    except tf.errors.OpError as error:
        return {"error": str(error)[:200]}
    if dtype == 7:
        values = np.asarray(restored.numpy(), dtype=object).reshape(-1).tolist()
        return {"strings": [text.decode("latin-1") for text in values]}
    if 11 <= dtype <= 13:
        restored = tf.bitcast(restored, {11: tf.int8, 12: tf.uint8, 13: tf.int32}[dtype])
    return {"sha256": hashlib.sha256(np.ascontiguousarray(restored.numpy()).tobytes()).hexdigest()}


def _facts(tf: Any, path: Path) -> dict[str, Any]:
    reader = tf.train.load_checkpoint(str(path))
    dtypes = reader.get_variable_to_dtype_map()
    return {
        name: {
            "dtype": dtypes[name].name,
            "shape": dims,
            **_restored(tf, path, name, dtypes[name].as_datatype_enum),
        }
        for name, dims in reader.get_variable_to_shape_map().items()
    }


def _array(generator: Any, name: str, dims: list[int]) -> Any:
    import numpy as np

    if name == "string":
        lengths = generator.integers(0, 300, size=dims)
        array = np.empty(dims, dtype=object)
        for at, length in np.ndenumerate(lengths):
            array[at] = generator.bytes(int(length))
        return array
    if name == "bool":
        return generator.random(dims) < 0.5
    if name.startswith("complex"):
        return (generator.normal(size=dims) + 1j * generator.normal(size=dims)).astype(name)
    if name.startswith("float"):
        return np.asarray(generator.normal(size=dims)).astype(name)
    limits = np.iinfo(name.removeprefix("q"))
    array = generator.integers(limits.min, limits.max, size=dims, dtype=limits.dtype, endpoint=True)
    array = np.asarray(array)
    array.reshape(-1)[:2] = [limits.min, limits.max][: array.size]
    return array


def _tensor(tf: Any, generator: Any, name: str, dims: list[int]) -> Any:
    constant = tf.constant(_array(generator, name, dims))
    return tf.bitcast(constant, name) if name.startswith("q") else constant


def _save(tf: Any, path: Path, tensors: dict[str, Any]) -> dict[str, Any]:
    tf.raw_ops.Save(filename=str(path), tensor_names=list(tensors), data=list(tensors.values()))
    return _facts(tf, path)


def _save_types(tf: Any, folder: Path) -> dict[str, Any]:
    import numpy as np

    generator = np.random.default_rng(0)
    shapes: list[list[int]] = [[], [5], [0, 3], [2, 3, 4], [1] * 7]
    tensors = {
        f"scope/{name}_{number}": _tensor(tf, generator, name, dims)
        for name in TYPES
        for number, dims in enumerate(shapes)
    }
    return _save(tf, folder / "types", tensors)


def _save_random(tf: Any, folder: Path) -> dict[str, Any]:
    """Save enough for many blocks: small tensors in front of, between and after large ones."""
    import numpy as np

    generator = np.random.default_rng(1)
    tensors = {}
    for number in range(400):
        name = str(generator.choice(sorted(TYPES)))
        extent = 90_000 if number % 100 == 7 and name != "string" else 12
        dims = [int(n) for n in generator.integers(1, extent, size=int(generator.integers(0, 2)))]
        parts = ["a", "", "b/c", "d.e", "Adam_1", "0", "\u00fc"]
        path = "/".join(str(part) for part in generator.choice(parts, size=2))
        tensors[f"{path}/{number}"] = _tensor(tf, generator, name, dims)
    return _save(tf, folder / "random", tensors)


def _save_cuts(tf: Any, folder: Path) -> dict[str, Any]:
    import numpy as np

    whole = np.arange(200, dtype=np.float32).reshape(10, 20)
    pieces = {"0,4:0,20": whole[:4], "4,6:0,15": whole[4:, :15], "4,6:15,5": whole[4:, 15:]}
    tf.raw_ops.SaveSlices(
        filename=str(folder / "cuts"),
        tensor_names=["w"] * 3,
        shapes_and_slices=[f"10 20 {piece}" for piece in pieces],
        data=[tf.constant(piece) for piece in pieces.values()],
    )
    return _facts(tf, folder / "cuts")


def _save_graph(tf: Any, folder: Path) -> dict[str, Any]:
    """Save a graph with partitioned variables in both forms, in one file and in three shards."""
    v1 = tf.compat.v1
    config = v1.ConfigProto(device_count={"CPU": 3})
    with tf.Graph().as_default(), v1.Session(config=config) as session:
        with v1.variable_scope("scope", partitioner=v1.fixed_size_partitioner(3)), tf.device("/cpu:1"):
            w = v1.get_variable("w", initializer=tf.reshape(tf.range(40, dtype=tf.float32), [10, 4]))
        with tf.device("/cpu:2"):
            v1.get_variable("v", initializer=tf.range(3))
            v1.train.get_or_create_global_step()
        with tf.device("/cpu:0"):
            v1.get_variable("scope/b", initializer=tf.zeros([0, 2]))
            v1.train.AdamOptimizer().minimize(tf.reduce_sum(tf.convert_to_tensor(w)))
        session.run(v1.global_variables_initializer())
        for sharded in (False, True):
            for version in (1, 2):
                name = f"graph_{version}_{sharded}"
                saver = v1.train.Saver(write_version=version, sharded=sharded)
                (folder / name).mkdir()
                saver.save(session, str(folder / name / "model.ckpt"), global_step=7)
    names = {"graph_1_False": "model.ckpt-7", "graph_1_True": "model.ckpt-7-?????-of-00003"}
    return {name: _facts(tf, folder / name / base) for name, base in names.items()}
