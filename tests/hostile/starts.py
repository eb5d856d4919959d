"""What each target of targets.py is tried with first: small inputs that it accepts; fuzzing varies them."""

from __future__ import annotations

import base64
import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from functools import cache
from typing import Any

from ckpttool.core import Container, Inline, Leaf, Tree, key, sidecar
from ckpttool.encodings import protobuf
from ckpttool.formats import embedded_tree
from tests import bundle_writer, v1_writer
from tests.hostile.seeds import BY_NAME


@cache
def listing(name: str) -> bytes:
    """Return what the process that lists HDF5 files says of a seed."""
    from ckpttool.formats import hdf5

    seed = BY_NAME[name]
    path = seed.home / seed.path
    with path.open("rb") as stream:
        return json.dumps(hdf5.run_child(stream.fileno(), 0, path.stat().st_size, str(path))).encode()


def seed(*names: str) -> Callable[[], list[bytes]]:
    return lambda: [
        data for n in names for f, data in BY_NAME[n].contents().items() if f in BY_NAME[n].damaged
    ]


def members(seed: str, end: str) -> Callable[[], list[bytes]]:
    def result() -> list[bytes]:
        with zipfile.ZipFile(BY_NAME[seed].home / BY_NAME[seed].path) as archive:
            return [archive.read(name) for name in archive.namelist() if name.endswith(end)]

    return result


def pickles() -> list[bytes]:
    values: list[Any] = [
        {"a": [1, -5, 2.5, "é", b"x", None, True]},
        {1, 2},
        frozenset("a"),
        1 << 70,
        (1,) * 5,
    ]
    torch = members("torch zip", "data.pkl")()
    return [*(pickle.dumps(v, p) for v in values for p in (0, 2, 4, 5)), *torch, *seed("pickle", "d3rlpy")()]


def tables() -> list[bytes]:
    return [
        *seed("TF bundle, index", "TF V1 file")(),
        bundle_writer.table([(b"", b"x"), (b"ab", b""), (b"ac", b"y")]),
    ]


def blocks() -> list[bytes]:
    first = bundle_writer.block([(b"", bundle_writer.header()), (b"abc", b"value"), (b"abd", b"other")])
    return [first, bundle_writer.block([])]


def compressed() -> list[bytes]:
    import cramjam

    return [bytes(cramjam.snappy.compress_raw(block)) for block in (*blocks(), bytes(500))]


def shapes() -> list[bytes]:
    writer = bundle_writer
    data = bytes(256)
    return [
        writer.entry(1, writer.shape(4), 0, 16, writer.masked(data[:16])),
        writer.entry(9, writer.shape(2, 3), 8, 48, writer.masked(data[:48])),
        writer.entry(7, b"", 0, 5, writer.strings(b"")[1]),
        writer.entry(
            1, writer.shape(8), 0, 32, writer.masked(data[:32]), more=writer.field(7, writer.field(1, b""))
        ),
    ]


def keyed() -> list[bytes]:
    writer = bundle_writer
    first = writer.entry(1, writer.shape(4), 0, 16, writer.masked(bytes(16)))

    def spelled(key: bytes, value: bytes) -> bytes:
        return bytes([len(key)]) + key + bytes([len(value)]) + value

    return [spelled(b"", writer.header()) + spelled(b"a", first) + spelled(b"b", first)]


def graphs() -> list[bytes]:
    writer = bundle_writer
    graph = writer.graph(
        writer.node([("agent", 1), ("optimizer", 3)]),
        writer.node([("w", 2), ("again", 1)]),
        writer.variable("w", "agent/w"),
        writer.node([("iter", 2)], slots=[(2, "m", 2)]),
    )
    return [graph, writer.graph(writer.node())]


def v1_seeds() -> list[bytes]:
    values = {"x": struct.pack("<4f", 1, 2, 3, 4)}
    header = v1_writer.header(*(v1_writer.meta(n.encode(), v1_writer.shape(4), 1, [(0, -1)]) for n in values))
    record = v1_writer.value(b"x", [(0, -1)], v1_writer.floats(values["x"]))
    return [len(header).to_bytes(2, "little") + header + record]


def events_seeds() -> list[bytes]:
    whole = protobuf.summary_record(1.5, 100, {"eval/return": -200.0, "loss": 0.25})
    return [whole[12:-4]]


def records() -> list[bytes]:
    return [protobuf.event_file_header(1.0) + protobuf.summary_record(1.5, 100, {"loss": 1.0})]


def headers() -> list[bytes]:
    whole = BY_NAME["safetensors"].contents()["model.safetensors"]
    own = {
        "a": {"dtype": "F32", "shape": [5, 10], "data_offsets": [0, 200]},
        "__metadata__": {"format": "pt"},
    }
    return [whole[8 : 8 + int.from_bytes(whole[:8], "little")], json.dumps(own).encode()]


def array_headers() -> list[bytes]:
    return [
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (4, 4), }\n",
        b"{'descr': [('a', '<f4'), ('b', '|S3', (2,))], 'fortran_order': True, 'shape': (3,), }\n",
        b"{'descr': '|O', 'fortran_order': False, 'shape': (), }\n",
    ]


def arrays() -> list[bytes]:
    import numpy as np

    contents = []
    for value in (np.arange(6.0).reshape(2, 3), np.array("text"), np.zeros((2, 2), ">i2", order="F")):
        stream = io.BytesIO()
        np.save(stream, value)
        contents.append(stream.getvalue())
    return contents


def shard_maps() -> list[bytes]:
    names = ("actor.0.weight", "actor.0.bias", "actor.2.weight", "actor.2.bias")
    members = dict.fromkeys(names, "model-00001.safetensors")
    return [json.dumps({"metadata": {"total_size": 232}, "weight_map": members}).encode()]


def scripts() -> list[bytes]:
    torch = members("torch zip", "data.pkl")()[0]
    code = (
        b'class M(Module):\n  __parameters__ = ["weight", "bias", ]\n  __buffers__ = []\n  weight : Tensor\n'
    )
    return [torch + b"\0CODE\0" + code]


def keras_seeds() -> list[bytes]:
    layers = [
        {"class_name": "Dense", "config": {"name": name, "units": 2, "activation": "relu"}} for name in "ab"
    ]
    optimizer = {"optimizer": {"class_name": "Adam", "config": {"name": "adam", "epsilon": 1e-7}}}
    model = {"class_name": "Functional", "config": {"layers": layers}, "compile_config": optimizer}
    return [json.dumps(model).encode(), *members(".keras", "config.json")()]


def keras_metadata_seeds() -> list[bytes]:
    field = bundle_writer.field
    node = (
        field(2, 1)
        + field(4, "_tf_keras_layer")
        + field(5, '{"class_name": "Dense", "config": {"units": 3}}')
    )
    return [field(1, node)]


def sidecars() -> list[bytes]:
    plain = sidecar.Sidecar(source={"path": "a.pt", "format": "pytorch"}, target_sha256="0" * 64)
    document = plain.document() | {
        "action_low": [-1.0],
        "action_high": [1.0],
        "obs_norm": {"mean": [0.0], "var": [1.0]},
    }
    return [plain.encode(), json.dumps(document).encode()]


RULES = b"""rest = "keep"
[[rule]]
from = "actor/{n}/weight"
to = "actor/layers/{n}/kernel"
rule = ["transpose", "reshape [64, 3]"]
[[drop]]
from = "optimizer/{rest*}"
[[add]]
to = "step"
value = 1
dtype = "int64"
shape = [2]
"""
YAML = b"""!!python/object/apply:collections.OrderedDict
- - - gamma
    - 0.99
  - - env_wrapper
    - [&a x, *a, {b: 1.5, c: ~, d: yes, e: 0x10}]
"""
SPEC = b'tensor_spec_value { name: "obs" shape { dim { size: 3 } } dtype: DT_FLOAT }'
SPECS = b"value { list_value { values { " + SPEC + b" } } }"
STATE = (
    b'model_checkpoint_path: "ckpt-2"\nall_model_checkpoint_paths: "ckpt-1"\n'
    b"all_model_checkpoint_timestamps: 1.5\n"
)
MAP = b'{"metadata": {"total_size": 9}, "weight_map": {"/layers/dense/vars": ["m_00000.weights.h5"]}}'


def recorded_seeds() -> list[bytes]:
    leaves = {(key("actor"), key(n)): Leaf("float32", (2,), Inline(bytes(8)), f"actor.{n}") for n in "wb"}
    tree = Tree(leaves, {}, {(): Container("dict"), (key("actor"),): Container("OrderedDict")})
    return [embedded_tree.encode_tree(tree, {path: f"actor/{path[1].value}" for path in leaves}).encode()]


def agents() -> list[bytes]:
    def nets(*names: str) -> bytes:
        return pickle.dumps({n: small() for n in names}, 4)

    return [
        nets("actor.l1.weight", "actor.l1.bias", "critic.l1.weight", "critic.l4.weight"),
        nets("policy/mean/kernel", "qf1/fc/kernel", "log_std"),
        *seed("pickle")(),
    ]


def small() -> Any:
    import numpy as np

    return np.ones((2, 3), "f4")


def settings() -> list[bytes]:
    return members("SB3 zip", "data")()


def serialized() -> list[bytes]:
    data = json.loads(settings()[0])
    return [
        base64.b64decode(v[":serialized:"])
        for v in data.values()
        if isinstance(v, dict) and ":serialized:" in v
    ]
