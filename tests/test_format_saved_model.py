"""SavedModels: what TensorFlow says of its own, which path means one, graphs that are damaged or lie."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import random
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.core import Checkpoint, CkpttoolError, FormatError, Leaf, TruncatedError, key, limits
from ckpttool.core.digests import digest_checkpoint
from ckpttool.encodings import protobuf
from ckpttool.formats import Probe, open_checkpoint, tf_bundle, tf_saved_model, torch_zip
from ckpttool.testing.formats import FormatContract
from tests.bundle_writer import bundle, field, graph, node, shape, variable, varint
from tests.conftest import CORPUS, in_process
from tests.golden_texts import Golden
from tests.tensorflow_child import run_each

CHILD = str(Path(__file__).with_name("saved_models.py"))
SAVED = CORPUS / "tf" / "savedmodel"


# SavedModels made byte by byte.


def entry(number: int, name: str, value: bytes) -> bytes:
    """An entry of a map field."""
    return field(number, field(1, name) + field(2, value))


def info(name: str, dims: bytes, dtype: int = 1) -> bytes:
    return field(1, name) + field(2, dtype) + field(3, dims)


def meta(version: str = "2.15.0", tags: tuple[str, ...] = ("serve",), more: bytes = b"") -> bytes:
    own = b"".join(field(4, tag) for tag in tags) + field(5, version)
    return field(2, field(1, own) + more)


def child(name: str, number: int) -> bytes:
    return field(1, (field(1, number) if number else b"") + field(2, name))


def user(identifier: str, metadata: str = "", children: bytes = b"", more: bytes = b"") -> bytes:
    return children + field(4, field(1, identifier) + (field(3, metadata) if metadata else b"")) + more


def var(name: str, width: int, trainable: int = 1, dtype: int = 1) -> bytes:
    return field(7, field(1, dtype) + field(2, shape(width)) + field(3, trainable) + field(6, name))


def concrete(name: str, *captured: int) -> bytes:
    return entry(2, name, field(2, b"".join(map(varint, captured))))


def objects(*nodes: bytes, functions: bytes = b"") -> bytes:
    return field(7, b"".join(field(1, item) for item in nodes) + functions)


LAYER = json.dumps(
    {
        "class_name": "Dense",
        "name": "l1",
        "config": {
            "name": "l1",
            "units": 9,
            "activation": "relu",
            "kernel_initializer": {"class_name": "Zeros", "config": {}},
            "shape": {"class_name": "__tuple__", "items": [None, 3]},
            "function": "x" * 5000,
        },
    }
)
SIGNATURE = entry(
    5,
    "act",
    entry(1, "obs", info("act_obs:0", shape(-1, 3)))
    + entry(2, "action", info("Call:0", field(3, 1), 2))
    + field(3, "tensorflow/serving/predict"),
)
# 0 root, 1 layer, 2 optimizer, 3 kernel, 4 bias, 5 mean, 6 iteration, 7 slot, 8 function, 9 signatures, 10
# the signature's function, 11 a layer without weights, 12 a variable that was renamed.
OBJECTS = objects(
    user(
        "_generic_user_object",
        children=child("layer", 1) + child("optimizer", 2) + child("signatures", 9) + child("leak", 11),
    ),
    user(
        "_tf_keras_layer",
        LAYER,
        child("kernel", 3) + child("bias", 4) + child("moving_mean", 5) + child("__call__", 8),
    ),
    user("optimizer", children=child("iter", 6), more=field(3, field(1, 3) + field(2, "m") + field(3, 7))),
    var("dense/kernel", 40),
    var("dense/bias", 30),
    var("dense/mean", 30, 0),
    var("Adam/iter", 2, 0),
    var("Adam/m/kernel", 40, 0),
    field(6, field(1, "__inference_call_1") + field(1, "__inference_call_2")),
    user("signature_map", children=child("act", 10)),
    field(8, field(1, "__inference_signature_3")),
    user("_tf_keras_layer", json.dumps({"class_name": "LeakyReLU", "name": "k", "config": {"alpha": 0.5}})),
    var("frozen", 20, 0),
    functions=concrete("__inference_call_1", 3, 4)
    + concrete("__inference_call_2", 3, 4, 5, 11)
    + concrete("__inference_signature_3", 4, 3),
)
ASSET = field(6, field(1, field(1, "asset:0")) + field(2, "words.txt"))
GRAPH = field(2, field(1, field(1, "a")) + field(1, field(1, "b")) + field(2, field(1, b"") + field(1, b"")))
PB = field(1, 1) + meta(more=GRAPH + SIGNATURE + ASSET + OBJECTS)
# Other numbers than those above: the two graphs are joined by their edges.
STORED = graph(
    node([("optimizer", 3), ("layer", 1), ("old", 7)]),
    node([("moving_mean", 2), ("bias", 5), ("kernel", 4)]),
    variable("m", "dense/mean"),
    node([("iter", 6)], slots=[(4, "m", 8)]),
    variable("k", "dense/kernel"),
    variable("b", "dense/bias"),
    variable("i", "Adam/iter"),
    variable("f", "frozen"),
    variable("s", "Adam/m/kernel"),
)


def floats(seed: int, count: int) -> bytes:
    return np.random.default_rng(seed).normal(size=count).astype(np.float32).tobytes()


VALUES = {
    f"{name}/.ATTRIBUTES/VARIABLE_VALUE": floats(at, width)
    for at, (name, width) in enumerate({"b": 30, "f": 20, "i": 2, "k": 40, "m": 30, "s": 40}.items())
}


def make(folder: Path, pb: bytes | None = PB, values: Any = None, stored: bytes | None = STORED) -> str:
    (folder / "variables").mkdir(parents=True, exist_ok=True)
    bundle(folder / "variables" / "variables", VALUES if values is None else values, stored)
    if pb is not None:
        (folder / "saved_model.pb").write_bytes(pb)
    return str(folder)


def facts(checkpoint: Checkpoint) -> dict[str, tuple[str, bool | None, str | None]]:
    names = checkpoint.tree.names
    return {names[p]: (leaf.role, leaf.trainable, leaf.name) for p, leaf in checkpoint.tree.tensors()}


def leaves(checkpoint: Checkpoint) -> dict[str, Leaf]:
    return {leaf.key: leaf for _, leaf in checkpoint.tree.tensors()}


class TestSavedModel(FormatContract):
    module = tf_saved_model

    def make(self, folder: Path) -> str:
        values = VALUES | {f"{name}/.ATTRIBUTES/VARIABLE_VALUE": floats(9, 2000) for name in "xy"}
        (folder / "model" / "assets").mkdir(parents=True)
        (folder / "model" / "assets" / "words.txt").write_text("a\n")
        return make(folder / "model", values=values)

    def test_no_truncation_gets_through(self, path: str) -> None:
        right = digest_checkpoint(open_checkpoint(path)).sha256
        for name in [file.path for file in open_checkpoint(path).files]:
            whole = Path(name).read_bytes()
            for length in sorted({0, 1, 47, len(whole) // 2, len(whole) - 8, len(whole) - 1}):
                Path(name).write_bytes(whole[:length])
                if name.endswith(".pb"):
                    # A graph that is cut off costs what it would have said, and no variable.
                    checkpoint = open_checkpoint(path)
                    assert digest_checkpoint(checkpoint).sha256 == right
                    assert any("saved_model.pb" in note for note in checkpoint.notes)
                else:
                    with pytest.raises(CkpttoolError):
                        digest_checkpoint(open_checkpoint(path))
            Path(name).write_bytes(whole)


# What the graph says.


def test_names_roles_and_what_is_trained(tmp_path: Path) -> None:
    checkpoint = tf_saved_model.read(make(tmp_path))
    assert facts(checkpoint) == {
        "layer/moving_mean": ("buffer", False, "dense/mean"),
        "layer/bias": ("parameter", True, "dense/bias"),
        "layer/kernel": ("parameter", True, "dense/kernel"),
        "optimizer/iter": ("other", False, "Adam/iter"),
        "optimizer/slots/m/layer/kernel": ("slot", False, "Adam/m/kernel"),
        "old": ("buffer", False, "frozen"),  # found by its name: no edge leads to it
    }
    assert checkpoint.integrity == "crc32c"
    assert "2.15.0" in str(checkpoint.writer)
    assert [Path(f.path).name for f in checkpoint.files] == [
        "saved_model.pb",
        "variables.index",
        "variables.data-00000-of-00001",
    ]


def test_layers_are_plain_facts(tmp_path: Path) -> None:
    containers = tf_saved_model.read(make(tmp_path)).tree.containers
    result = {tuple(step.value for step in path): (c.kind, c.name, c.state) for path, c in containers.items()}
    assert result == {
        ("layer",): (
            "module",
            "Dense",
            {
                "layer": "l1",
                "units": 9,
                "activation": "relu",
                "kernel_initializer": "Zeros",
                "shape": [None, 3],
            },
        ),
        ("leak",): ("module", "LeakyReLU", {"layer": "k", "alpha": 0.5}),
    }


def test_details(tmp_path: Path) -> None:
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "words.txt").write_text("a\n")
    (tmp_path / "fingerprint.pb").write_bytes(b"")
    (tmp_path / "policy_specs.pbtxt").write_bytes(b"")
    checkpoint = tf_saved_model.read(make(tmp_path))
    used = ["layer/bias", "layer/kernel"]
    assert json.loads(json.dumps(checkpoint.details)) == {
        "tags": [["serve"]],
        "producer": "2.15.0",
        "signatures": {
            "act": {
                "method": "tensorflow/serving/predict",
                "inputs": {"obs": {"dtype": "float32", "shape": [-1, 3]}},
                "outputs": {"action": {"dtype": "float64", "shape": None}},
                "variables": used,
            }
        },
        "functions": {
            "__inference_call_1": {"object": "layer/__call__", "captures": used},
            "__inference_call_2": {"object": "layer/__call__", "captures": ["layer/moving_mean", *used]},
            "__inference_signature_3": {"object": "signatures/act", "captures": used},
        },
        "initializers": {},
        "objects": {
            "variable": 6,
            "_tf_keras_layer": 2,
            "_generic_user_object": 1,
            "optimizer": 1,
            "function": 1,
            "signature_map": 1,
            "bare_concrete_function": 1,
        },
        "graph": {"nodes": 2, "functions": 2},
        "assets": ["words.txt"],
        "files": ["fingerprint.pb", "policy_specs.pbtxt"],
    }
    assert checkpoint.notes == ()


def test_newer_keras_describes_layers_in_a_file_of_its_own(tmp_path: Path, golden: Golden) -> None:
    record = field(2, 1) + field(3, "root.layer") + field(4, "_tf_keras_layer")
    wrong = field(2, 2) + field(4, "_tf_keras_layer") + field(5, LAYER)  # object 2 is an optimizer
    newer = json.dumps({"class_name": "Own>Layer", "config": {"epsilon": 1e-3, "limit": float("inf")}})
    (tmp_path / "keras_metadata.pb").write_bytes(field(1, record + field(5, newer)) + field(1, wrong))
    checkpoint = tf_saved_model.read(make(tmp_path))
    modules = {path[-1].value: (c.name, c.state) for path, c in checkpoint.tree.containers.items()}
    assert modules["layer"] == ("Layer", {"epsilon": 1e-3, "limit": "inf"})
    assert "optimizer" not in modules
    (tmp_path / "keras_metadata.pb").write_bytes(b"\x0a\xff\xff\xff\xff\x07")
    checkpoint = tf_saved_model.read(str(tmp_path))
    golden("\n".join(checkpoint.notes))
    assert facts(checkpoint)["layer/kernel"][1] is True


@pytest.mark.parametrize("metadata", ["[" * 100_000, '{"class_name": 3}', "1" * 5000, "{", '{"config": []}'])
def test_descriptions_that_are_none(tmp_path: Path, metadata: str) -> None:
    pb = meta(more=objects(user("_tf_keras_model", metadata, child("old", 1)), var("frozen", 20)))
    checkpoint = tf_saved_model.read(make(tmp_path, pb))
    assert not checkpoint.tree.containers
    assert facts(checkpoint)["old"] == ("parameter", True, "frozen")


def test_a_variable_of_another_shape_is_not_the_one(tmp_path: Path, golden: Golden) -> None:
    pb = meta(more=objects(user("x", children=child("old", 1) + child("lost", 2)), var("f", 21), var("l", 1)))
    checkpoint = tf_saved_model.read(make(tmp_path, pb))
    assert facts(checkpoint)["old"] == ("parameter", None, "frozen")
    golden("\n".join(checkpoint.notes))


def test_a_tree_with_modules_can_be_saved_as_a_torch_file(tmp_path: Path) -> None:
    checkpoint = tf_saved_model.read(make(tmp_path / "model"))
    assert checkpoint.tree.containers
    (piece,) = torch_zip.pieces(checkpoint.tree)
    with open(tmp_path / "out.pt", "wb") as stream:
        piece.write(stream)
    again = open_checkpoint(str(tmp_path / "out.pt")).tree
    kernel = again[key("layer"), key("kernel")]
    assert isinstance(kernel, Leaf)
    assert bytes(kernel.read()) == VALUES["k/.ATTRIBUTES/VARIABLE_VALUE"]


# TensorFlow 1.


def op(name: str, kind: str, *inputs: str, attributes: bytes = b"") -> bytes:
    return field(1, field(1, name) + field(2, kind) + b"".join(field(3, i) for i in inputs) + attributes)


def strings_constant(name: str, *values: str) -> bytes:
    tensor = field(1, 7) + b"".join(field(8, value) for value in values)
    return op(name, "Const", attributes=entry(5, "dtype", field(6, 7)) + entry(5, "value", field(8, tensor)))


def collected(name: str, *variables: tuple[str, str]) -> bytes:
    listed = b"".join(field(1, field(1, f"{v}:0") + field(2, assign)) for v, assign in variables)
    return entry(4, name, field(2, listed))


def version1(more: bytes = b"") -> bytes:
    nodes = (
        op("x", "Placeholder")
        + op("w", "VariableV2")
        + op("w/init/normal", "TruncatedNormal", "shape")
        + op("w/init/mul", "Mul", "w/init/normal", "stddev")
        + op("shape", "Const")
        + op("stddev", "Const")
        + op("w/first", "Assign", "w", "w/init/mul:0")
        + op("h", "VarHandleOp")
        + op("h/zeros", "Fill")
        + op("h/Assign", "AssignVariableOp", "h", "h/zeros")
        + op("h/read", "ReadVariableOp", "h", "^x")
        + op("loop/a", "Merge", "x", "loop/b")
        + op("loop/b", "NextIteration", "loop/a", "w")
        + op("y", "Add", "loop/a:1", "^nowhere")
        + op("z", "Mul", "y", "h/read")
        + strings_constant("save/SaveV2/tensor_names", "average/h", "w")
        + op("save/SaveV2", "SaveV2", "save/Const", "save/SaveV2/tensor_names", "s", "h/read", "w")
    )
    signatures = entry(5, "first", entry(2, "y", info("y:0", b""))) + entry(
        5, "second", entry(1, "y", info("y:0", b"")) + entry(2, "z", info("z:0", b""))
    )
    variables = collected("variables", ("w", "w/first"), ("h", "")) + collected(
        "trainable_variables", ("w", "w/first")
    )
    return meta("1.15.0", more=field(2, nodes) + signatures + variables + more)


def test_graphs_of_version_1(tmp_path: Path) -> None:
    values = {"w": floats(1, 3), "average/h": floats(2, 2)}
    checkpoint = tf_saved_model.read(make(tmp_path, version1(), values, None))
    assert facts(checkpoint) == {
        "average/h": ("buffer", False, "h"),
        "w": ("parameter", True, "w"),
    }
    assert checkpoint.details["initializers"] == {"average/h": "Fill", "w": "TruncatedNormal"}
    signatures = checkpoint.details["signatures"]
    assert {name: s["variables"] for name, s in signatures.items()} == {
        "first": ["w"],
        "second": ["average/h"],  # y is given by the caller, so what is behind it is not used
    }


def test_a_signature_of_two_graphs_and_all_tags(tmp_path: Path) -> None:
    other = meta("1.15.0", ("train", "gpu"), entry(5, "first", field(3, "method")))
    values = {"w": floats(1, 3), "average/h": floats(2, 2)}
    checkpoint = tf_saved_model.read(make(tmp_path, version1() + other, values, None))
    assert checkpoint.details["tags"] == [["serve"], ["train", "gpu"]]
    assert [name.split()[0] for name in checkpoint.details["signatures"]] == ["first", "second", "first"]
    assert all(tag in list(checkpoint.details["signatures"])[2] for tag in ("train", "gpu"))


def test_assets_of_version_1_are_in_a_collection(tmp_path: Path) -> None:
    listed = field(1, field(1, "type.googleapis.com/x") + field(2, field(2, "vocabulary")))
    # Of a oneof, the last field counts alone.
    earlier = field(1, field(1, "type.googleapis.com/x") + field(2, field(2, "earlier")))
    pb = version1(entry(4, "saved_model_assets", field(2, earlier) + field(5, listed)))
    checkpoint = tf_saved_model.read(make(tmp_path, pb, {"w": floats(1, 3)}, None))
    assert checkpoint.details["assets"] == ["vocabulary"]


# Which path means a SavedModel.


def test_the_ways_to_name_one(tmp_path: Path) -> None:
    folder = make(tmp_path / "export")
    for path in (folder, f"{folder}/", f"{folder}/saved_model.pb"):
        location = tf_saved_model.claims(Probe(path))
        assert location is not None
        assert os.path.samefile(location, folder)
    prefix = f"{folder}/variables/variables"
    for path in (f"{folder}/variables", prefix, f"{prefix}.index"):
        assert tf_saved_model.claims(Probe(path)) is None
        assert tf_bundle.claims(Probe(path)) == prefix
    assert tf_saved_model.claims(Probe(str(tmp_path))) is None


def test_other_checkpoints_in_the_folder(tmp_path: Path) -> None:
    folder = make(tmp_path / "export")
    bundle(tmp_path / "export" / "ckpt-1", {"w": floats(1, 3)})
    bundle(tmp_path / "export", {"w": floats(1, 3)})
    assert open_checkpoint(folder).format == "saved_model"
    os.unlink(f"{folder}/saved_model.pb")
    assert open_checkpoint(folder).format == "tensor_bundle"


def test_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert len(open_checkpoint("saved_model.pb").tree) == len(open_checkpoint(".").tree) == 6


@pytest.mark.parametrize("text", [True, False])
def test_variables_without_a_graph(tmp_path: Path, text: bool, golden: Golden) -> None:
    folder = make(tmp_path, None)
    if text:
        (tmp_path / "saved_model.pbtxt").write_text("saved_model_schema_version: 1\n")
        assert tf_saved_model.claims(Probe(f"{folder}/saved_model.pbtxt")) == folder
    (tmp_path / "policy_specs.pbtxt").write_text("")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.format == "saved_model"
    assert len(checkpoint.tree) == 6
    (note,) = checkpoint.notes
    golden(note)
    assert "signatures" not in checkpoint.details
    assert "policy_specs.pbtxt" in checkpoint.details["files"]


def test_a_model_of_constants(tmp_path: Path, golden: Golden) -> None:
    (tmp_path / "saved_model.pb").write_bytes(meta(more=SIGNATURE))
    checkpoint = open_checkpoint(str(tmp_path))
    assert (len(checkpoint.tree), checkpoint.integrity) == (0, "none")
    (note,) = checkpoint.notes
    golden(note)
    ran = in_process("inspect", tmp_path, "--json")
    assert ran.status == 0
    assert ran.json()["notes"] == [note]


# Damage, and graphs that lie.


def test_variables_that_are_not_there(tmp_path: Path, golden: Golden) -> None:
    (tmp_path / "saved_model.pb").write_bytes(PB)
    with pytest.raises(TruncatedError) as caught:
        tf_saved_model.read(str(tmp_path))
    golden(caught.value)
    (tmp_path / "saved_model.pb").write_bytes(PB[:-1])
    with pytest.raises(FormatError) as caught:
        tf_saved_model.read(str(tmp_path))
    golden(caught.value)


@pytest.mark.parametrize(
    "pb",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", id="LFS pointer"),
        pytest.param(b"<!doctype html><html>", id="HTML"),
        pytest.param(b"\x12" + varint(1 << 31) + b"abc", id="length beyond the end"),
        pytest.param(b"\x12" + b"\xff" * 9 + b"\x01", id="length of 64 bits"),
        pytest.param(b"\x12" + b"\xff" * 12, id="length that does not end"),
        pytest.param(field(1, 1), id="no graph"),
        pytest.param(field(2, 7), id="number for a message"),
        pytest.param(b"\x13" * 5000 + b"\x14" * 5000, id="groups"),
        pytest.param(meta(more=field(7, 3)), id="number of objects"),
        pytest.param(meta(more=objects(user("x", children=child("old", 77)))), id="child beyond the objects"),
        pytest.param(meta(more=objects(user("x", children=child("old", -1)))), id="negative child"),
        pytest.param(meta(more=objects(user("x"), functions=concrete("f", 5))), id="function of no object"),
        pytest.param(
            meta(more=objects(user("x", more=field(3, field(1, 9) + field(2, "m"))))), id="slot of no object"
        ),
        pytest.param(
            meta(more=entry(5, "a", entry(1, "x", field(3, field(2, field(1, b"abc")))))),
            id="bytes for a shape",
        ),
    ],
)
def test_graphs_that_cannot_be_read(tmp_path: Path, pb: bytes, golden: Golden) -> None:
    checkpoint = open_checkpoint(make(tmp_path, pb))
    golden("\n".join(checkpoint.notes))
    assert {key: bytes(leaf.read()) for key, leaf in leaves(checkpoint).items()} == VALUES
    assert all(note.isprintable() for note in checkpoint.notes)


def test_nesting_costs_nothing(tmp_path: Path) -> None:
    nested = b""
    for _ in range(20_000):
        nested = field(2, nested)[-4000:]  # valid from inside, cut outside
    deep = field(2, b"x")
    for _ in range(9):
        deep = field(5, deep) + field(2, deep)
    composite = entry(5, "a", entry(2, "y", field(5, field(2, field(5, field(2, deep))))))
    for more in (field(2, nested), field(7, nested), composite):
        assert len(open_checkpoint(make(tmp_path, meta(more=more))).tree) == 6


def test_cycles_and_long_chains_of_objects(tmp_path: Path) -> None:
    count = 50_000
    chain = [child("next", at + 1) + child("root", 0) + field(6, field(1, f"f{at}")) for at in range(count)]
    captured = b"".join(concrete(f"f{at}", count) for at in range(0, count, 1000))
    pb = meta(more=objects(*chain, var("frozen", 20), functions=captured))
    checkpoint = tf_saved_model.read(make(tmp_path, pb))
    functions = checkpoint.details["functions"]
    assert len(functions) == 50
    assert functions["f0"] == {"object": "", "captures": ["old"]}
    assert functions["f9000"] == {"object": None, "captures": ["old"]}


def test_a_graph_that_is_no_file(tmp_path: Path, golden: Golden) -> None:
    folder = make(tmp_path, None)
    os.mkfifo(tmp_path / "saved_model.pb")
    golden("\n".join(open_checkpoint(folder).notes))


def test_a_graph_that_is_too_large(tmp_path: Path, golden: Golden) -> None:
    with limits.using(replace(limits.Limits(), graph_bytes=500)):
        checkpoint = tf_saved_model.read(make(tmp_path))
    golden("\n".join(checkpoint.notes))
    assert len(checkpoint.tree) == 6


@pytest.mark.parametrize("part", [b"\x0a\x00", b"\x50\x00"], ids=["parts", "fields"])
def test_parts_are_counted(tmp_path: Path, part: bytes, golden: Golden) -> None:
    pb = meta(more=field(2, part * 9000))
    with limits.using(replace(limits.Limits(), graph_parts=2000)):
        checkpoint = tf_saved_model.read(make(tmp_path, pb))
        golden("\n".join(checkpoint.notes))
        assert len(checkpoint.tree) == 6


def test_details_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    monkeypatch.setattr(tf_saved_model.GraphDetails.__init__, "__defaults__", (9,))
    checkpoint = tf_saved_model.read(make(tmp_path))
    golden("\n".join(checkpoint.notes))
    text = json.dumps(checkpoint.details)
    assert text.count("layer/") < 9
    assert facts(checkpoint)["layer/kernel"][1] is True


def test_assets_outside_are_named_and_left_alone(tmp_path: Path, golden: Golden) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    names = ("../../secret.txt", "/etc/passwd", "a/../../../x", "nul\0", "inside.txt", "\ud800")
    pb = meta(more=b"".join(field(6, field(2, name.encode("utf-8", "surrogatepass"))) for name in names))
    folder = tmp_path / "model"
    (folder / "assets" / "sub").mkdir(parents=True)
    (folder / "assets" / "sub" / "more.txt").write_text("x")
    (folder / "assets" / "link").symlink_to(tmp_path)
    checkpoint = open_checkpoint(make(folder, pb))
    assert checkpoint.details["assets"][:2] == ["../../secret.txt", "/etc/passwd"]
    assert "sub/more.txt" in checkpoint.details["assets"]
    assert not any("secret.txt" in name for name in checkpoint.details["assets"][1:])
    golden("\n".join(checkpoint.notes).encode(errors="backslashreplace").decode())
    assert all(Path(file.path).is_relative_to(folder) for file in checkpoint.files)
    assert in_process("inspect", folder, "--json").json()["details"]["assets"]


def test_a_linked_folder_of_assets_is_not_followed(tmp_path: Path, golden: Golden) -> None:
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "x.txt").write_text("x")
    folder = make(tmp_path / "model")
    (tmp_path / "model" / "assets").symlink_to(tmp_path / "away")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.details["assets"] == ["words.txt"]
    golden("\n".join(checkpoint.notes))


def test_many_assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    monkeypatch.setattr(tf_saved_model, "MAX_LISTED", 3)
    (tmp_path / "assets").mkdir()
    for at in range(9):
        (tmp_path / "assets" / f"{at}.txt").write_text("x")
    checkpoint = open_checkpoint(make(tmp_path))
    assert len(checkpoint.details["assets"]) == 3
    golden("\n".join(checkpoint.notes))


def test_any_damage_is_a_note_or_an_error_of_ours(tmp_path: Path) -> None:
    """Truncations and changed bytes of graphs of both kinds, and of Keras's descriptions."""
    dice = random.Random(5)
    facts = field(1, field(2, 1) + field(4, "_tf_keras_layer") + field(5, LAYER))
    folder = make(tmp_path)
    values = {key: hashlib.sha256(value).hexdigest() for key, value in VALUES.items()}
    for name, whole in (("saved_model.pb", PB), ("saved_model.pb", version1()), ("keras_metadata.pb", facts)):
        damages = [whole[:length] for length in range(0, len(whole), 29)]
        for _ in range(60):
            damaged = bytearray(whole)
            for _ in range(dice.randint(1, 3)):
                damaged[dice.randrange(len(whole))] = dice.choice(
                    [0, 1, 0x7F, 0x80, 0xFF, dice.randrange(256)]
                )
            damages.append(bytes(damaged))
        for damage in damages:
            (tmp_path / name).write_bytes(damage)
            checkpoint = tf_saved_model.read(folder)
            json.dumps(checkpoint.details)
            listed = leaves(checkpoint)
            assert listed.keys() == values.keys()
            assert all(leaf.of is None or leaf.of in checkpoint.tree for leaf in listed.values())
        assert {k: hashlib.sha256(leaf.read()).hexdigest() for k, leaf in listed.items()} == values


def long_graph(folder: Path, count: int) -> str:
    folder.mkdir()
    nodes = [op("x", "Placeholder"), op("w", "VariableV2")]
    nodes += [op(f"scope/op_{at}", "Add", f"scope/op_{at - 1}" if at else "w", "x") for at in range(count)]
    last = entry(5, "run", entry(2, "y", info(f"scope/op_{count - 1}:0", b"")))
    pb = meta("1.15.0", more=field(2, b"".join(nodes)) + last)
    return make(folder, pb, {"w": floats(1, 3)}, None)


def test_a_hundred_thousand_nodes(tmp_path: Path) -> None:
    count = 100_000
    folder = long_graph(tmp_path / "time", count)
    began = time.process_time()
    checkpoint = tf_saved_model.read(folder)
    assert time.process_time() - began < 10  # 0.8 s where it was written
    assert checkpoint.details["signatures"]["run"]["variables"] == ["w"]
    assert checkpoint.details["graph"]["nodes"] == count + 2
    # To be traced takes a reader many times as long: a fifth of the nodes, in a fifth of the memory.
    folder = long_graph(tmp_path / "memory", count // 5)
    tracemalloc.start()
    tf_saved_model.read(folder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 30 << 20


def test_listing_loads_no_numpy_and_no_framework(tmp_path: Path) -> None:
    folder = make(tmp_path)
    code = (
        "import sys; from ckpttool.formats import tf_saved_model as saved_model\n"
        "assert not [m for m in sys.modules if m.startswith('ckpttool.formats.tf_saved_model.')]\n"
        f"assert len(saved_model.read({folder!r}).tree) == 6\n"
        "assert not {'numpy', 'tensorflow', 'torch', 'ml_dtypes', 'google.protobuf'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(tf_saved_model.__file__).parents[3])


def test_a_description_that_is_too_long(tmp_path: Path) -> None:
    with limits.using(replace(limits.Limits(), json_bytes=len(LAYER) - 1)):
        assert [c.name for c in tf_saved_model.read(make(tmp_path)).tree.containers.values()] == ["LeakyReLU"]


def test_fields_one_at_a_time_and_packed_numbers() -> None:
    for data in (PB, b"", field(1, 2) + field(3, b"abc")):
        assert list(protobuf.iter_fields(memoryview(data))) == protobuf.parse_fields(memoryview(data))
    with pytest.raises(TruncatedError):
        list(protobuf.iter_fields(PB[:-1]))
    assert protobuf.as_ints(varint(1) + varint(-2) + varint(300)) == [1, -2, 300]
    assert protobuf.as_ints((1 << 64) - 1) == [-1]
    with pytest.raises(TruncatedError):
        protobuf.as_ints(b"\x80")


# TensorFlow and Keras as referees.

without_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
without_keras2 = pytest.mark.skipif(
    importlib.util.find_spec("tf_keras") is None, reason="tf_keras is not installed"
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("saved_models")
    programs = ["build", *(["build_keras2"] if importlib.util.find_spec("tf_keras") else [])]
    facts = run_each(CHILD, dict.fromkeys(programs, folder))
    return folder, facts["build"] | {"keras2": facts.get("build_keras2")}


@pytest.fixture(scope="module")
def keras2(written: tuple[Path, dict[str, Any]]) -> tuple[Path, dict[str, Any]]:
    folder, facts = written
    return folder / "keras2", facts["keras2"]


def require_same_tensors(checkpoint: Checkpoint, tensors: dict[str, str]) -> None:
    digests = {key: hashlib.sha256(leaf.read()).hexdigest() for key, leaf in leaves(checkpoint).items()}
    assert digests == tensors


def require_same_objects(checkpoint: Checkpoint, facts: dict[str, Any]) -> None:
    require_same_tensors(checkpoint, facts["tensors"])
    by_name = {leaf.name: leaf.trainable for _, leaf in checkpoint.tree.tensors()}
    assert by_name == facts["variables"]
    names = {checkpoint.tree.names[path]: leaf.name for path, leaf in checkpoint.tree.tensors()}
    signatures = checkpoint.details["signatures"]
    assert signatures.keys() == facts["signatures"].keys()
    for name, signature in facts["signatures"].items():
        for side in ("inputs", "outputs"):
            shown = {
                key: [tensor["dtype"], [None if e == -1 else e for e in tensor["shape"]]]
                for key, tensor in signatures[name][side].items()
            }
            assert shown == signature[side]
        assert sorted(names[path] for path in signatures[name]["variables"]) == signature["variables"]


@pytest.mark.tensorflow
@without_tensorflow
@pytest.mark.parametrize("name", ["module", "keras3"])
def test_what_tensorflow_loads(written: tuple[Path, dict[str, Any]], name: str) -> None:
    checkpoint = open_checkpoint(str(written[0] / name))
    assert checkpoint.notes == ()
    require_same_objects(checkpoint, written[1][name])


@pytest.mark.tensorflow
@without_tensorflow
def test_a_module_of_tensorflow(written: tuple[Path, dict[str, Any]]) -> None:
    checkpoint = open_checkpoint(str(written[0] / "module"))
    roles = {name: role for name, (role, _, _) in facts(checkpoint).items()}
    assert roles["mean"] == "buffer"
    assert roles["steps"] == "counter"
    assert roles["parts/1/w"] == "parameter"
    assert checkpoint.details["assets"] == ["words.txt"]
    captures = {f["object"]: f["captures"] for f in checkpoint.details["functions"].values()}
    assert captures["act"] == captures["signatures/act"] == ["parts/0/w", "parts/0/b", "mean"]
    assert captures["value"] == ["parts/1/w"]


@pytest.mark.tensorflow
@without_tensorflow
def test_constants_of_tensorflow(written: tuple[Path, dict[str, Any]]) -> None:
    checkpoint = open_checkpoint(str(written[0] / "constants"))
    assert not checkpoint.tree
    assert len(checkpoint.notes) == 1


@pytest.mark.tensorflow
@without_tensorflow
@without_keras2
def test_what_keras_2_saved(keras2: tuple[Path, dict[str, Any]]) -> None:
    folder, facts = keras2
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.notes == ()
    require_same_tensors(checkpoint, facts["tensors"])
    trained = [leaf.name for _, leaf in checkpoint.tree.tensors() if leaf.role == "parameter"]
    assert sorted(map(str, trained)) == sorted(facts["trained"])
    for _, leaf in checkpoint.tree.tensors():
        assert leaf.trainable is facts["variables"].get(leaf.name, False), leaf.name
    modules = {c.state["layer"]: c for c in checkpoint.tree.containers.values() if isinstance(c.state, dict)}
    for name, (kind, _) in facts["layers"].items():
        assert modules[name].name == kind
    states = {name: c.state for name, c in modules.items()}
    assert (states["one"]["units"], states["one"]["activation"]) == (4, "relu")
    assert states["norm"]["epsilon"] == 0.01
    assert states["leak"]["alpha"] == 0.25
    signature = checkpoint.details["signatures"]["serving_default"]
    assert len(signature["variables"]) == len(facts["signatures"]["serving_default"]["variables"]) == 8


@pytest.mark.tensorflow
@without_tensorflow
@pytest.mark.parametrize("name", ["simple", "several"])
def test_what_tensorflow_1_loads(written: tuple[Path, dict[str, Any]], name: str) -> None:
    facts = written[1][name]
    checkpoint = open_checkpoint(str(written[0] / name))
    assert checkpoint.notes == ()
    require_same_tensors(checkpoint, facts["tensors"])
    by_name = {leaf.name: leaf.trainable for _, leaf in checkpoint.tree.tensors()}
    whole = {variable.split("/part_")[0]: trained for variable, trained in facts["variables"].items()}
    assert by_name == whole
    names = {checkpoint.tree.names[path]: leaf.name for path, leaf in checkpoint.tree.tensors()}
    signatures = checkpoint.details["signatures"]
    for signature, used in facts["used"].items():
        mine = signatures.get(f"{signature} (serve)", signatures[signature])
        assert {names[path] for path in mine["variables"]} == {n.split("/part_")[0] for n in used}


@pytest.mark.tensorflow
@without_tensorflow
def test_initializers_and_tags(written: tuple[Path, dict[str, Any]]) -> None:
    details = open_checkpoint(str(written[0] / "simple")).details
    assert details["initializers"] == {
        "net/w": "TruncatedNormal",
        "net/b": "Const",
        "u": "RandomUniform",
        "mean": "Const",
        "cut/p": "RandomStandardNormal",
        "global_step": "Const",
    }
    assert open_checkpoint(str(written[0] / "several")).details["tags"] == [["train", "gpu"], ["serve"]]


# The corpus.


def truth_tensors(truth: Any) -> dict[str, Any]:
    """The tensors in a truth file, by key, wherever they are."""
    tensors: dict[str, Any] = {}
    for name, value in truth.items() if isinstance(truth, dict) else ():
        if isinstance(value, dict):
            tensors |= {name: value} if "sha256" in value else truth_tensors(value)
    return tensors


@pytest.mark.corpus
@pytest.mark.skipif(not SAVED.is_dir(), reason="the shared corpus is not beside the project")
def test_golden_corpus() -> None:
    checked = 0
    for truth in sorted(SAVED.rglob("*.truth.json")):
        folder = str(truth).removesuffix(".truth.json")
        if not os.path.isdir(folder):
            continue
        listed = leaves(open_checkpoint(folder))
        for name, fact in truth_tensors(json.loads(truth.read_text())).items():
            if name != "_CHECKPOINTABLE_OBJECT_GRAPH":
                assert hashlib.sha256(listed[name].read()).hexdigest() == fact["sha256"]
                assert listed[name].trainable is not None
                checked += 1
    assert checked > 40


@pytest.mark.corpus
@pytest.mark.skipif(not SAVED.is_dir(), reason="the shared corpus is not beside the project")
def test_signatures_of_the_corpus() -> None:
    details = open_checkpoint(str(SAVED / "tf_java_1" / "saved_model")).details
    assert details["assets"] == ["foo.txt"]
    used = {name: signature["variables"] for name, signature in details["signatures"].items()}
    assert used["serving_default"] == ["a", "b"]
    assert used["regress_x2_to_y3"] == ["a", "c"]
    bare = open_checkpoint(str(SAVED / "serving_tf_text_regression" / "01"))
    assert not bare.tree
    assert bare.details["files"] == ["fingerprint.pb", "keras_metadata.pb"]
