"""Keras's archives: configurations that name what would run or ask for much, weights that lead outside."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hostile.case import BAIT, Case
from tests.hostile.crafted_any import written
from tests.hostile.zips import Made, archive, deflated

_LINE = ".keras"
Make = Callable[[Path], Path]


@functools.cache
def weights(kind: str = "") -> bytes:
    """Return a `.weights.h5` of one dense layer; of `kind` external, its kernel lies in the bait."""
    import h5py  # type: ignore[import-untyped]
    import numpy as np

    stream = io.BytesIO()
    with h5py.File(stream, "w") as file:
        group = file.create_group("layers/dense/vars")
        group.attrs["name"] = "dense"
        if kind == "external":
            group.create_dataset("0", (2, 2), "f4", external=[(f"../{BAIT}", 0, 16)])
        elif kind == "link":
            group["0"] = h5py.ExternalLink(f"../{BAIT}", "/x")
        elif kind == "bomb":
            group.create_dataset("0", (1 << 38, 2), "f4")
        else:
            group["0"] = np.ones((2, 2), "f4")
        group["1"] = np.ones(2, "f4")
    return stream.getvalue()


def model(*layers: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a Sequential of a dense layer and of these."""
    dense = {"class_name": "Dense", "config": {"name": "dense", "units": 2}}
    config = {"name": "m", "layers": [dense, *layers]}
    return {"module": "keras", "class_name": "Sequential", "config": config, "registered_name": None}


def _kept(config: bytes | dict[str, Any], *more: Made, kind: str = "") -> Make:
    text = json.dumps(config).encode() if isinstance(config, dict) else config

    def make(folder: Path) -> Path:
        about = Made("metadata.json", b'{"keras_version": "3.10.0"}')
        weights_member = Made("model.weights.h5", weights(kind))
        members = [about, deflated("config.json", text), weights_member, *more]
        return written("model.keras", archive(members))(folder)

    return make


def _declared(folder: Path) -> Path:
    """Write a configuration that claims to unpack to 512 MiB."""
    huge = deflated("config.json", _GOOD, size=1 << 29)
    return written("model.keras", archive([huge, Made("model.weights.h5", weights())]))(folder)


def _packed(more: int = 0, **claims: int) -> Make:
    """Return the maker of an archive whose weights are compressed, and claimed to be `more` bytes longer."""

    def make(folder: Path) -> Path:
        weights_member = deflated("model.weights.h5", weights(), **{"size": len(weights()) + more, **claims})
        return written("model.keras", archive([Made("config.json", _GOOD), weights_member]))(folder)

    return make


def _fine(name: str, make: Make, **more: Any) -> Case:
    """Return a case whose configuration is listed as data; it has no part in the commands on weights."""
    known = {"inspect": 0, "digest": None, "convert": None}
    return Case(f"keras-{name}", _LINE, make, **{**known, **more})


def _refused(name: str, make: Make, **more: Any) -> Case:
    return Case(f"keras-{name}", _LINE, make, **{"digest": None, "convert": None, **more})


def _layer(cls: str, module: str = "keras.layers", **config: Any) -> dict[str, Any]:
    return {"module": module, "class_name": cls, "config": {"name": "x", **config}, "registered_name": cls}


def _called(module: str, name: str) -> dict[str, Any]:
    return {"module": module, "class_name": "function", "config": name, "registered_name": name}


_BYTES = {"class_name": "__bytes__", "config": {"value": "/etc/passwd"}}
_LAMBDA = {"class_name": "__lambda__", "config": {"code": "4wEAAAA=", "defaults": None, "closure": None}}
_NESTED = {"class_name": "Wrapped", "config": {"layer": model(_layer("Lambda", function=_LAMBDA))}}
_GOOD = json.dumps(model()).encode()
_MAP = {"metadata": {"total_size": 4}, "weight_map": {"/layers/dense/vars": [f"../{BAIT}"]}}


def _legacy(folder: Path, config: str, **attributes: Any) -> Path:
    import h5py
    import numpy as np

    path = folder / "model.h5"
    with h5py.File(path, "w") as file:
        file.attrs["model_config"] = config
        file.attrs["layer_names"] = attributes.get("layers", np.array([b"dense"]))
        group = file.create_group("dense")
        group.attrs["weight_names"] = attributes.get("names", np.array([b"dense/kernel:0"]))
        group["dense/kernel:0"] = np.ones((2, 2), "f4")
    return path


def _lambda_h5(folder: Path) -> Path:
    return _legacy(folder, json.dumps(model(_layer("Lambda", function=["4wEAAAA=", None, None]))))


def _names_absent(folder: Path) -> Path:
    import numpy as np

    return _legacy(folder, "{}", names=np.array([b"../../etc/passwd"]))


def _sharded(folder: Path) -> Path:
    (folder / "model.weights.json").write_text(json.dumps(_MAP))
    return folder / "model.weights.json"


CASES = (
    _fine(
        "lambda",
        _kept(model(_layer("Lambda", function=_LAMBDA))),
        digest=0,
        convert=0,
    ),
    _fine("lambda-nested", _kept(model(_NESTED))),
    _fine("lambda-h5", _lambda_h5),
    _fine("module-os", _kept(model(_layer("getcwd", module="os")))),
    _fine("module-at-the-top", _kept({**model(), "module": "builtins", "class_name": "exec"})),
    _fine("vocabulary-path", _kept(model(_layer("StringLookup", vocabulary="/etc/passwd")))),
    _fine("vocabulary-address", _kept(model(_layer("TextVectorization", vocabulary="http://127.0.0.1:9/x")))),
    _fine("tfsm-path", _kept(model(_layer("TFSMLayer", filepath=f"../{BAIT}")))),
    _fine("symbol-writes", _kept(model(_layer("TFOpLambda", function="compat.v1.write_file")))),
    _fine("symbol-without-a-dot", _kept(model(_layer("TFOpLambda", function="load_op_library")))),
    _fine("symbol-that-is-no-text", _kept(model(_layer("TFOpLambda", function=["\x1b[2J"] * 20)))),
    _fine("operation-writes", _kept(model(_layer("TensorFlowOpLayer", node_def={"op": "WriteFile"})))),
    _fine("attribute-of-a-tensor", _kept(model(_layer("InstanceMethod", attr_name="__class__")))),
    _fine("function-of-a-module", _kept(model(_layer("Dense", activation=_called("my.own", "square"))))),
    _fine("vocabulary-in-bytes", _kept(model(_layer("StringLookup", vocabulary=_BYTES)))),
    _fine("registered-in-a-list", _kept({**model(), "registered_name": [["x"]]})),
    _fine("compile-config", _kept({**model(), "compile_config": {"optimizer": "os.getcwd", "loss": "eval"}})),
    _fine("names-of-layers", _kept(model(_layer("Dense\x1b[2J\n", units="\u202e../../x")))),
    _fine("assets", _kept(_GOOD, Made("assets/../../x", b"x"))),
    _fine("traversal", _kept(_GOOD, Made("../../../x", b"x"), Made("/etc/x", b"x"))),
    _fine("config-not-json", _kept(b"\x80\x04.")),
    _fine("config-list", _kept(b"[]")),
    _fine("config-nan", _kept(_GOOD.replace(b'"units": 2', b'"units": NaN, "rate": -Infinity'))),
    _fine("config-4000-digits", _kept(_GOOD.replace(b'"units": 2', b'"units": ' + b"9" * 4000))),
    _fine("config-5000-digits", _kept(_GOOD.replace(b'"units": 2', b'"units": ' + b"9" * 5000))),
    _fine("config-lone-surrogate", _kept(_GOOD.replace(b'"name": "m"', b'"name": "\\ud800"'))),
    _refused(
        "config-over-the-limit",
        _kept(_GOOD + b" " * 4096),
        options=("--limit", "json_bytes=4096"),
    ),
    _refused("config-nested", _kept(b'{"a":' * 100_000 + b"1" + b"}" * 100_000)),
    _refused("config-nested-300", _kept(b'{"a":' * 300 + b"1" + b"}" * 300)),
    _refused("config-values", _kept(b'{"a":[' + b"[]," * 5_000_000 + b"[]]}")),
    _refused("config-declared-bomb", _declared),
    _refused("two-configs", _kept(_GOOD, Made("config.json", _GOOD))),
    _refused("two-weights", _kept(_GOOD, Made("model.weights.h5", b""))),
    _refused("external-storage", _kept(model(), kind="external")),
    _refused("external-link", _kept(model(), kind="link")),
    _refused("shape-bomb", _kept(model(), kind="bomb"), inspect=0, digest=2, convert=2),
    _fine("weights-packed", _packed(), digest=0, convert=0),
    _refused("weights-packed-crc", _packed(crc=7), inspect=0, digest=2, convert=2),
    _refused("weights-packed-short", _packed(more=1)),
    _refused("weights-packed-bomb", _packed(size=(1 << 32) - 2)),
    _refused(
        "weights-pickled",
        written("model.keras", archive([Made("config.json", _GOOD), Made("model.weights.npz", b"")])),
    ),
    _refused("shard-map-outside", _sharded),
    _refused("weight-names-absent", _names_absent),
)
