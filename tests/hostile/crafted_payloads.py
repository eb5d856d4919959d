"""Pickles inside of other things (settings in JSON, a worker's state in bytes), and what is code besides.

Each holds what crafted_pickle has alone in a file; the format around it must open it and tell of it.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import h5py  # type: ignore[import-untyped]
import numpy as np

from ckpttool.encodings import dumps
from tests.hostile.case import Case
from tests.hostile.crafted_any import written
from tests.hostile.crafted_pickle import beside
from tests.test_format_pytorch import archive, floats, tensor

_LINE = "pickle"
_KERAS = ".keras"
_ACT = b"\x80\x04cos\ngetcwd\n)R."
_CLASS = b"\x80\x04cmy.net\nPolicy\n)\x81."
_STATE = archive(dumps({"w": tensor()}, 2), {"0": floats(1, 2, 3, 4)})


def zip_bytes(members: dict[str, bytes]) -> bytes:
    """Return a zip archive of these members."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as built:
        for name, data in members.items():
            built.writestr(name, data)
    return stream.getvalue()


def _settings(payload: bytes) -> bytes:
    pickled = {":type:": "", ":serialized:": base64.b64encode(payload).decode()}
    return json.dumps({"policy_class": pickled, "gamma": 0.99}).encode()


def _sb3(payload: bytes, state: bytes = _STATE) -> Callable[[Path], Path]:
    members = {"data": _settings(payload), "policy.pth": state, "_stable_baselines3_version": b"2.3.0"}
    return written("agent.zip", zip_bytes(members))


def _sb2(payload: bytes) -> Callable[[Path], Path]:
    arrays = io.BytesIO()
    np.savez(arrays, **{"model/w:0": np.zeros(2, "f4")})
    members = {
        "data": _settings(payload),
        "parameters": arrays.getvalue(),
        "parameter_list": b'["model/w:0"]',
    }
    return written("agent.zip", zip_bytes(members))


def _d3(config: str = "{}", payload: bytes | None = None) -> Callable[[Path], Path]:
    inner = (
        _STATE
        if payload is None
        else archive(beside(payload, dumps(tensor(), 2)[2:-1]), {"0": floats(1, 2, 3, 4)})
    )
    return written("agent.d3", pickle.dumps({"torch": inner, "config": config, "version": "2.8.1"}, 4))


def _rllib(payload: bytes) -> Callable[[Path], Path]:
    worker = beside(payload)
    return written("checkpoint-1", pickle.dumps({"worker": worker}, 4))


def _script(folder: Path) -> Path:
    state = b"\x80\x02c__torch__\nNet\n)\x81}" + b"X\x01\0\0\0w" + dumps(tensor(), 2)[2:-1] + b"sb."
    code = b'class Net(Module):\n  __parameters__ = ["w"]\n  __buffers__ = []\n'
    data = archive(
        state, {"0": floats(1, 2, 3, 4)}, **{"constants.pkl": b"\x80\x02).", "code/__torch__.py": code}
    )
    return written("net.pt", data)(folder)


def _h5() -> bytes:
    stream = io.BytesIO()
    with h5py.File(stream, "w") as file:
        file["layers/dense/vars/0"] = np.zeros((2, 2), "f4")
    return stream.getvalue()


def _keras(*layers: dict[str, object]) -> Callable[[Path], Path]:
    model = {"class_name": "Sequential", "module": "keras", "config": {"name": "net", "layers": list(layers)}}
    members = {"metadata.json": b"{}", "config.json": json.dumps(model).encode(), "model.weights.h5": _h5()}
    return written("net.keras", zip_bytes(members))


def _layer(module: str | None, cls: str, **config: object) -> dict[str, object]:
    return {"module": module, "class_name": cls, "config": config, "registered_name": None}


def _old_keras(folder: Path) -> Path:
    code = {"class_name": "Lambda", "config": {"name": "act", "function": ["4wEAAAA=", None, None]}}
    model = {"class_name": "Sequential", "config": {"name": "net", "layers": [code]}}
    with h5py.File(folder / "net.h5", "w") as file:
        file.attrs["model_config"] = json.dumps(model)
        file.create_group("model_weights").attrs["layer_names"] = np.array([], "S1")
    return folder / "net.h5"


def _saved_model(op: bytes) -> Callable[[Path], Path]:
    def field(number: int, data: bytes) -> bytes:
        return bytes((number << 3 | 2, len(data))) + data

    # SavedModel.meta_graphs (2), MetaGraphDef.graph_def (2), GraphDef.library (2),
    # FunctionDefLibrary.function (1), FunctionDef.node_def (3): name (1), op (2).
    node = field(1, b"n") + field(2, op)
    data = field(2, field(2, field(2, field(1, field(3, node)))))

    def make(folder: Path) -> Path:
        (folder / "saved_model.pb").write_bytes(data)
        return folder

    return make


def _case(
    name: str,
    make: Callable[[Path], Path],
    shows: str = "",
    *,
    strict: int = 1,
    convert: int | None = 0,
    line: str = _LINE,
) -> Case:
    return Case(name, line, make, 0, None, convert, strict, shows)


CASES = (
    _case("pickle-sb3-settings", _sb3(_ACT)),
    _case("pickle-sb3-classes", _sb3(_CLASS)),
    _case("pickle-sb3-state", _sb3(b"N.", archive(_ACT))),
    Case(
        "pickle-sb3-not-base64",
        _LINE,
        written(
            "agent.zip",
            zip_bytes(
                {
                    "data": b'{"x": {":serialized:": "??"}}',
                    "policy.pth": _STATE,
                    "_stable_baselines3_version": b"2",
                }
            ),
        ),
    ),
    _case("pickle-sb2-settings", _sb2(_ACT)),
    _case("pickle-d3rlpy-archive", _d3(payload=_ACT[2:-1])),
    _case("pickle-rllib-worker", _rllib(_ACT[2:-1])),
    _case("torch-script", _script),
    _case(
        "payload-keras-lambda",
        _keras(_layer("keras.layers", "Lambda", name="act")),
        line=_KERAS,
    ),
    _case("keras-h5-lambda", _old_keras, line="HDF5", convert=None),
    _case("payload-keras-module-os", _keras(_layer("os", "getcwd")), line=_KERAS),
    _case(
        "keras-module-of-keras-utils",
        _keras(_layer("keras.utils", "get_file")),
        line=_KERAS,
        shows="keras.utils.get_file",
    ),
    _case(
        "keras-module-of-others",
        _keras(_layer("my.net", "Noisy")),
        line=_KERAS,
    ),
    _case(
        "keras-vocabulary",
        _keras(_layer("keras.layers", "StringLookup", vocabulary="../bait.bin")),
        line=_KERAS,
    ),
    _case(
        "keras-tfsm-layer",
        _keras(_layer("keras.layers", "TFSMLayer", filepath="/etc")),
        line=_KERAS,
        shows="TFSMLayer",
    ),
    _case(
        "keras-own-layers",
        _keras(_layer("keras.layers", "Dense", name="dense")),
        strict=0,
        line=_KERAS,
        shows="dense",
    ),
    _case("graph-read-file", _saved_model(b"ReadFile"), convert=None, line="SavedModel"),
    _case("graph-py-func", _saved_model(b"EagerPyFunc"), convert=None, line="SavedModel"),
    _case("graph-saver-elsewhere", _saved_model(b"RestoreV2"), convert=None, line="SavedModel"),
    _case("graph-pure", _saved_model(b"MatMul"), strict=0, convert=None, line="SavedModel"),
)
