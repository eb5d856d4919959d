"""Small real files to be damaged, and what is known of each; `python -m tests.hostile.seeds` makes them anew.

The frameworks themselves wrote all but the tar (torch has not written that form since 2016), at the versions
of constraints.txt; test_differential.py lets the frameworks read them again. They are kept as files so that
mutant number 1,234 of a seed is the same bytes on every machine.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILES = Path(__file__).with_name("seed_files")


@dataclass(frozen=True)
class Seed:
    """A checkpoint in a folder of its own.

    `path` is what a reader is given and `damaged` the files that are damaged, relative to the folder;
    `covered` says that checksums of the format cover every tensor, `peer` which of tests/hostile/readers.py
    reads it, `read` whether ckpttool does.
    """

    name: str
    path: str
    damaged: tuple[str, ...]
    covered: bool
    peer: str | None = None
    folder: str = ""
    read: bool = True

    @property
    def home(self) -> Path:
        """The folder that holds the files."""
        return FILES / (self.folder or self.name)

    def contents(self) -> dict[str, bytes]:
        """Return every file of the checkpoint by its name in the folder."""
        paths = sorted(path for path in self.home.rglob("*") if path.is_file())
        return {str(path.relative_to(self.home)): path.read_bytes() for path in paths}


_INDEX, _DATA = "ckpt-1.index", "ckpt-1.data-00000-of-00001"
SEEDS = (
    Seed("torch zip", "model.pt", ("model.pt",), True, "torch", "torch_zip"),
    Seed("torch zip, no CRCs", "model.pt", ("model.pt",), False, "torch", "torch_no_crc"),
    Seed("torch legacy", "model.pt", ("model.pt",), False, "torch", "torch_legacy"),
    Seed("torch tar", "model.tar", ("model.tar",), False, "torch_tar", "torch_tar"),
    Seed("torch DCP", ".", (".metadata", "__0_0.distcp"), False, "torch_dcp", "torch_dcp"),
    Seed("TF bundle, index", "ckpt-1", (_INDEX,), True, "tensorflow", "bundle"),
    Seed("TF bundle, data", "ckpt-1", (_DATA,), True, "tensorflow", "bundle"),
    Seed("TF bundle, both", "ckpt-1", (_INDEX, _DATA), True, "tensorflow", "bundle"),
    Seed("TF V1 file", "model.ckpt", ("model.ckpt",), True, "tensorflow", "tensorflow_v1"),
    Seed("SavedModel graph", ".", ("saved_model.pb",), False, "saved_model", "saved_model"),
    Seed("safetensors", "model.safetensors", ("model.safetensors",), False, "safetensors"),
    Seed("npz stored", "model.npz", ("model.npz",), True, "numpy", "npz_stored"),
    Seed("npz deflated", "model.npz", ("model.npz",), True, "numpy", "npz_deflated"),
    Seed("npy", "model.npy", ("model.npy",), False, "numpy", "npy"),
    Seed("HDF5 plain", "model.weights.h5", ("model.weights.h5",), False, "h5py", "h5_plain"),
    Seed("HDF5 gzip", "model.weights.h5", ("model.weights.h5",), False, "h5py", "h5_gzip"),
    Seed("HDF5 fletcher32", "model.weights.h5", ("model.weights.h5",), False, "h5py", "h5_fletcher"),
    Seed("HDF5 latest", "model.weights.h5", ("model.weights.h5",), False, "h5py", "h5_latest"),
    Seed("HDF5 types", "model.h5", ("model.h5",), False, "h5py", "h5_types"),
    Seed("HDF5 chunks", "model.h5", ("model.h5",), False, "h5py", "h5_chunks"),
    Seed("HDF5 indexes", "model.h5", ("model.h5",), False, "h5py", "h5_indexes"),
    Seed("Keras .h5", "model.h5", ("model.h5",), False, "h5py", "h5_legacy"),
    Seed(".keras", "model.keras", ("model.keras",), True, "keras_zip", "keras"),
    Seed("SB3 zip", "agent.zip", ("agent.zip",), True, "sb3", "sb3"),
    Seed("SB2 pickle", "agent.pkl", ("agent.pkl",), False, None, "sb2"),
    Seed("RLlib pickle", "checkpoint-7", ("checkpoint-7",), False, None, "rllib"),
    Seed("d3rlpy", "agent.d3", ("agent.d3",), False, None, "d3rlpy"),
    Seed("pickle", "model.pkl", ("model.pkl",), False, "pickle", "pickle"),
    Seed("ONNX", "model.onnx", ("model.onnx",), False, "onnx", "onnx"),
    Seed("TorchScript", "model.pt", ("model.pt",), True, "torch_script", "torch_script"),
    Seed("msgpack", "params.msgpack", ("params.msgpack",), False, None, "msgpack", read=False),
)
# Spans of these come into other seeds. A seed more would give all mutants other numbers.
SPLICED = SEEDS[:28]
BY_NAME = {seed.name: seed for seed in SEEDS}


def _arrays() -> dict[str, Any]:
    import numpy as np

    generator = np.random.default_rng(7)
    shapes = {"actor.0.weight": (8, 3), "actor.0.bias": (8,), "actor.2.weight": (2, 8), "actor.2.bias": (2,)}
    return {name: generator.normal(size=shape).astype("f4") for name, shape in shapes.items()}


def _torch(path: Path) -> None:
    import numpy as np
    import torch

    arrays = {name: torch.from_numpy(array) for name, array in _arrays().items()}
    state = {
        n: {"step": torch.tensor(7.0), "exp_avg": v * 2, "exp_avg_sq": v * v}
        for n, v in enumerate(arrays.values())
    }
    group = {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8, "params": [0, 1, 2, 3]}
    agent = {"model": arrays, "optimizer": {"state": state, "param_groups": [group]}, "epoch": 12}
    small = {"model": arrays, "half": torch.arange(6).half(), "step": np.float64(3).item(), "note": "é"}
    for name in ("torch_zip", "torch_no_crc", "torch_legacy"):
        (path / name).mkdir()
    torch.save(agent, path / "torch_zip" / "model.pt")
    torch.serialization.set_crc32_options(False)
    torch.save(small, path / "torch_no_crc" / "model.pt")
    torch.serialization.set_crc32_options(True)
    torch.save(small, path / "torch_legacy" / "model.pt", _use_new_zipfile_serialization=False)
    _torch_sets(path, arrays)


def _torch_sets(path: Path, arrays: dict[str, Any]) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    from tests.test_format_d3rlpy import CONFIG, written
    from tests.torch_forms import tar

    (path / "torch_tar").mkdir()
    tar(torch, dict(list(arrays.items())[:2]), path / "torch_tar" / "model.tar")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = dcp.FileSystemWriter(path / "torch_dcp", sync_files=False)
        dcp.save({"model": arrays, "step": 3}, storage_writer=writer, no_dist=True)
    (path / "d3rlpy").mkdir()
    stream = io.BytesIO()
    torch.save({"policy": dict(list(arrays.items())[:2])}, stream)
    written(path / "d3rlpy" / "agent.d3", torch=stream.getvalue(), config=json.dumps(CONFIG))


def _others(path: Path) -> None:
    import h5py
    import numpy as np
    from safetensors.numpy import save_file

    from tests.test_format_keras_h5 import keras3_file

    arrays = _arrays()
    names = ("safetensors", "npz_stored", "npz_deflated", "npy", "h5_plain", "h5_gzip", "h5_fletcher")
    for name in (*names, "h5_latest", "h5_legacy", "h5_types", "h5_chunks", "h5_indexes"):
        (path / name).mkdir()
    save_file(arrays, path / "safetensors" / "model.safetensors", {"format": "pt"})
    np.savez(path / "npz_stored" / "model.npz", **arrays)
    np.savez_compressed(path / "npz_deflated" / "model.npz", **arrays)
    np.save(path / "npy" / "model.npy", arrays["actor.0.weight"])
    keras3_file(path / "h5_plain" / "model.weights.h5")
    for name, how in (("h5_gzip", {"compression": "gzip"}), ("h5_fletcher", {"fletcher32": True})):
        with h5py.File(path / name / "model.weights.h5", "w") as file:
            for number, array in enumerate(arrays.values()):
                file.create_dataset(f"layers/dense_{number}/vars/0", data=array, chunks=True, **how)
    with h5py.File(path / "h5_latest" / "model.weights.h5", "w", libver="latest") as file:
        for number, array in enumerate(arrays.values()):
            how = {"chunks": True, "maxshape": (None,) * array.ndim} if number < 2 else {}
            file.create_dataset(f"layers/dense_{number}/vars/0", data=array, **how)
    with h5py.File(path / "h5_legacy" / "model.h5", "w") as file:
        for name, array in arrays.items():
            layer, _, weight = name.rpartition(".")
            file.create_dataset(f"{layer}/{layer}/{weight}:0", data=array)
        layers = sorted(file)
        for layer in layers:
            file[layer].attrs["weight_names"] = [f"{layer}/{name}".encode() for name in file[layer][layer]]
        file.attrs["layer_names"] = [layer.encode() for layer in layers]
        file.attrs["backend"] = b"tensorflow"
        file.attrs["keras_version"] = b"2.15.0"
    _storage(path, arrays["actor.0.weight"])
    _agents(path, arrays)
    _graphs(path, arrays)


def _storage(path: Path, array: Any) -> None:
    """Write HDF5 files of every type, every layout, and every index of chunks that ckpttool reads."""
    import h5py
    import numpy as np

    kinds = ("<f2", "<f8", ">f8", ">f4", "i1", "u2", ">i4", "u8", "?", "<c8", ">c16", "S3")
    with h5py.File(path / "h5_types" / "model.h5", "w") as file:
        for number, kind in enumerate(kinds):
            file[f"{number}"] = np.arange(3 + number % 2).astype(kind)
        file.create_dataset("unset", (4,), "f4", fillvalue=2.5)
        file["none"], file["text"] = np.zeros((0, 3), "f4"), "text"
        small = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        small.set_layout(h5py.h5d.COMPACT)
        built = h5py.h5d.create(file.id, b"small", h5py.h5t.IEEE_F32BE, h5py.h5s.create_simple((2, 3)), small)
        built.write(h5py.h5s.ALL, h5py.h5s.ALL, array[:2])
    with h5py.File(path / "h5_chunks" / "model.h5", "w", userblock_size=512) as file:
        file.create_dataset("whole", data=array, chunks=(3, 2))
        file.create_dataset("packed", data=array, chunks=(3, 2), compression="gzip", shuffle=True)
        part = file.create_dataset("part", (10,), ">f8", chunks=(3,), fillvalue=7.5, fletcher32=True)
        part[4] = 3
    with h5py.File(path / "h5_indexes" / "model.h5", "w", libver="latest") as file:
        # One chunk; a fixed array; an extensible array; a B-tree of version 2.
        for packed in (None, "gzip"):
            for name, chunks, most in (
                ("one", (8, 3), (8, 3)),
                ("fixed", (3, 2), (8, 3)),
                ("extensible", (3, 2), (None, 3)),
                ("tree", (3, 2), (None, None)),
            ):
                options = {"chunks": chunks, "compression": packed, "maxshape": most}
                file.create_dataset(f"{name} {packed}", data=array, **options)
        early = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        early.set_chunk((3, 2))
        early.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        built = h5py.h5d.create(file.id, b"all", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((8, 3)), early)
        built.write(h5py.h5s.ALL, h5py.h5s.ALL, array)


def _agents(path: Path, arrays: dict[str, Any]) -> None:
    import pickle

    from tests import sb3_files
    from tests.test_format_rllib import single
    from tests.test_format_stable_baselines2 import pickled, variables

    for name in ("sb3", "sb2", "rllib", "pickle"):
        (path / name).mkdir()
    (path / "sb2" / "agent.pkl").write_bytes(pickled(list(variables().values())[1::2]))
    state = {"weights": {"fc/kernel": arrays["actor.0.weight"]}, "global_timestep": 3}
    (path / "rllib" / "checkpoint-7").write_bytes(single({"default_policy": state}))
    (path / "pickle" / "model.pkl").write_bytes(pickle.dumps({"weights": arrays, "gamma": 0.99}, 4))
    policy = sb3_files.owner(actor=sb3_files.mlp((3, 4, 2), sb3_files.nn.ReLU))
    agent = sb3_files.members({"policy": policy.state_dict()}, sb3_files.settings(sb3_files.TD3_POLICY))
    sb3_files.put(path / "sb3" / "agent.zip", agent)


def _graphs(path: Path, arrays: dict[str, Any]) -> None:
    """Write an ONNX model of many types and places of constants, TorchScript, and parameters of Flax."""
    import msgpack  # type: ignore[import-not-found]
    import numpy as np
    import onnx
    import torch
    from onnx import TensorProto, helper, numpy_helper

    for name in ("onnx", "torch_script", "msgpack"):
        (path / name).mkdir()
    raw = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    raw += [numpy_helper.from_array(np.array([True, False, True]), "mask")]
    raw += [numpy_helper.from_array(np.array([b"a", b"text"], object), "words")]
    kinds = (
        *("FLOAT", "DOUBLE", "INT64", "INT8", "UINT16", "BOOL", "FLOAT16", "BFLOAT16", "UINT32"),
        "COMPLEX64",
    )
    tensors = [helper.make_tensor(f"k_{k.lower()}", getattr(TensorProto, k), (3,), [1, 0, 1]) for k in kinds]
    tensors.append(helper.make_tensor("k_uint4", TensorProto.UINT4, (3,), [1, 15, 3]))
    value = numpy_helper.from_array(np.full((2,), 2.5, "f4"), "value")
    branch = helper.make_graph(
        [helper.make_node("Constant", [], ["inner"], "inner", value=value)], "branch", [], []
    )
    nodes = [
        helper.make_node("Gemm", ["obs", "actor.0.weight", "actor.0.bias"], ["1"], "first", transB=1),
        helper.make_node("Relu", ["1"], ["2"]),
        helper.make_node("Gemm", ["2", "actor.2.weight", "actor.2.bias"], ["3"], transB=1),
        helper.make_node("Constant", [], ["scale"], value=value),
        helper.make_node("If", ["mask"], ["4"], "if", then_branch=branch, else_branch=branch),
        helper.make_node("Mul", ["3", "scale"], ["action"]),
    ]
    obs = helper.make_tensor_value_info("obs", TensorProto.FLOAT, ["batch", 3])
    action = helper.make_tensor_value_info("action", TensorProto.FLOAT, ["batch", 2])
    graph = helper.make_graph(nodes, "policy", [obs], [action], [*raw, *tensors])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, str(path / "onnx" / "model.onnx"))
    torch.manual_seed(5)
    body = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    body.register_buffer("count", torch.tensor([7]))
    torch.jit.script(body).save(str(path / "torch_script" / "model.pt"))
    # flax/serialization.py, _ndarray_to_bytes: an array is extension 1, a tuple of shape, dtype and bytes.
    leaves = {
        name: msgpack.ExtType(1, msgpack.packb((array.shape, array.dtype.name, array.tobytes())))
        for name, array in arrays.items()
    }
    (path / "msgpack" / "params.msgpack").write_bytes(msgpack.packb({"params": leaves}))


def tensorflow(folder: Path) -> bool:
    """Write what TensorFlow and Keras write; runs in a process of its own."""
    import keras
    import numpy as np
    import tensorflow as tf

    keras.utils.set_random_seed(3)

    class Agent(tf.Module):
        def __init__(self) -> None:
            self.w = tf.Variable(np.random.default_rng(1).normal(size=(8, 4)).astype("f4"), name="w")
            self.b = tf.Variable(tf.ones([4]), name="b")
            self.step = tf.Variable(7, dtype=tf.int64, name="step")
            self.text = tf.Variable(["a", "text"], name="text")

        @tf.function(input_signature=[tf.TensorSpec([None, 8], tf.float32, "obs")])
        def act(self, obs: Any) -> Any:
            return tf.tanh(obs @ self.w + self.b)

    for name in ("bundle", "keras", "tensorflow_v1"):
        (folder / name).mkdir()
    agent = Agent()
    tf.train.Checkpoint(agent=agent).write(str(folder / "bundle" / "ckpt-1"))
    tf.saved_model.save(agent, str(folder / "saved_model"), signatures=agent.act.get_concrete_function())
    for extra in ("fingerprint.pb", "assets"):
        location = folder / "saved_model" / extra
        location.rmdir() if location.is_dir() else location.unlink(missing_ok=True)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, activation="relu")])
    model.save(folder / "keras" / "model.keras")
    v1 = tf.compat.v1
    with v1.Graph().as_default(), v1.Session() as session:
        v1.get_variable("net/w", initializer=np.arange(12, dtype="f4").reshape(3, 4))
        v1.get_variable("net/b", initializer=np.ones(4, "f4"))
        session.run(v1.global_variables_initializer())
        saver = v1.train.Saver(write_version=v1.train.SaverDef.V1)
        saver.save(
            session, str(folder / "tensorflow_v1" / "model.ckpt"), write_meta_graph=False, write_state=False
        )
    return True


def main() -> None:
    """Make all files anew; say how large each is."""
    from tests import tensorflow_child

    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        _torch(home)
        _others(home)
        tensorflow_child.run(__file__, "tensorflow", home)
        for seed in SEEDS:
            name = seed.folder or seed.name
            shutil.rmtree(FILES / name, ignore_errors=True)
            shutil.copytree(home / name, FILES / name)
    for seed in SEEDS:
        sizes = {name: len(data) for name, data in seed.contents().items()}
        sys.stdout.write(f"{seed.name}: {sizes}\n")


if __name__ == "__main__":
    main()
