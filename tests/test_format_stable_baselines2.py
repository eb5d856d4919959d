"""Stable-Baselines 2: real agents of its zoo, and files built as its save_util.py builds them."""

from __future__ import annotations

import base64
import collections
import io
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.core import (
    CkpttoolError,
    FormatError,
    Leaf,
    Record,
    UnsupportedError,
    ValueLeaf,
    attr,
    dangerous_calls,
    display,
    index,
    key,
)
from ckpttool.core.digests import digest_checkpoint
from ckpttool.formats import Probe, open_checkpoint, sb3, torch_legacy
from ckpttool.formats.sb3 import STABLE_BASELINES2
from ckpttool.formats.torch_legacy import PYTHON_PICKLE
from ckpttool.listing.audit import audit_notes
from ckpttool.testing.formats import FormatContract
from tests.conftest import ROOT
from tests.pickles import ACTING, importable, instance, stand_in
from tests.test_format_pytorch_containers import WithoutChecksums

ZOO = ROOT / ".." / "shared" / "corpus" / "tf" / "sb2" / "zoo"
BOX = stand_in("gym.spaces.box.Box")
POLICY = stand_in("stable_baselines.td3.policies.MlpPolicy")
MEAN_STD = stand_in("stable_baselines.common.running_mean_std.RunningMeanStd")
LAYERS = {"pi/fc0": (3, 64), "pi/dense": (64, 1), "values_fn/qf1/fc0": (4, 64), "values_fn/qf1/qf1": (64, 1)}


def box(size: int, high: float) -> Any:
    low = np.full(size, -high, "f4")
    return instance(BOX, dtype=np.dtype("f4"), shape=(size,), low=low, high=-low)


def variables() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(7)
    arrays = {}
    for net in ("model", "target"):
        for layer, shape in LAYERS.items():
            arrays[f"{net}/{layer}/kernel:0"] = generator.normal(size=shape).astype("f4")
            arrays[f"{net}/{layer}/bias:0"] = generator.normal(size=shape[1]).astype("f4")
    arrays["model/log_ent_coef:0"] = np.float32(-1.5)
    return arrays


def settings_() -> dict[str, Any]:
    return {
        "gamma": 0.99,
        "n_envs": 1,
        "policy": POLICY,
        "observation_space": box(3, 8.0),
        "action_space": box(1, 2.0),
        "policy_kwargs": {"layers": [64]},
        "_vectorize_action": False,
        "target_entropy": np.float32(-1),
    }


def serialized(data: dict[str, Any]) -> bytes:
    """As save_util.py's data_to_json: what JSON cannot hold is a pickle in base64."""
    settings = {}
    for name, value in data.items():
        try:
            json.dumps(value)
            settings[name] = value
        except TypeError:
            with importable(BOX, POLICY):
                text = base64.b64encode(pickle.dumps(value, 4)).decode()
            settings[name] = {":type:": str(type(value)), ":serialized:": text, "shown": "text"}
    return json.dumps(settings, indent=4).encode()


def zipped(
    arrays: dict[str, Any] | None = None,
    data: bytes | None = None,
    names: bytes | None = None,
    method: int = zipfile.ZIP_STORED,
) -> bytes:
    arrays = variables() if arrays is None else arrays
    inner, outer = io.BytesIO(), io.BytesIO()
    np.savez(inner, **arrays)
    with zipfile.ZipFile(outer, "w", method) as archive:
        archive.writestr("data", serialized(settings_()) if data is None else data)
        archive.writestr("parameters", inner.getvalue())
        archive.writestr("parameter_list", json.dumps(list(arrays)).encode() if names is None else names)
    return outer.getvalue()


def pickled(parameters: object, protocol: int = 4) -> bytes:
    with importable(BOX, POLICY):
        return pickle.dumps((settings_(), parameters), protocol)


def put(folder: Path, data: bytes, name: str = "agent.zip") -> str:
    (folder / name).write_bytes(data)
    return str(folder / name)


def arrays_of(path: str) -> dict[str, np.ndarray]:
    return {leaf.key: leaf.array() for _, leaf in open_checkpoint(path).tree.tensors()}


class TestZip(FormatContract):
    module = STABLE_BASELINES2

    def make(self, folder: Path) -> str:
        return put(folder, zipped())


class TestPickle(WithoutChecksums):
    module = STABLE_BASELINES2

    def make(self, folder: Path) -> str:
        return put(folder, pickled(collections.OrderedDict(variables())), "agent.pkl")


class TestPlainPickle(WithoutChecksums):
    module = PYTHON_PICKLE

    def make(self, folder: Path) -> str:
        value = {"weights": list(variables().values()), "step": 3, "name": "x", "nested": {"a": (1, 2.5)}}
        return put(folder, pickle.dumps(value, 4), "vars.pkl")


def test_a_zip_is_listed_by_name(tmp_path, golden):
    checkpoint = open_checkpoint(put(tmp_path, zipped()))
    names = list(variables())
    tensors = [(display(path), leaf) for path, leaf in checkpoint.tree.tensors()]
    assert [leaf.key for _, leaf in tensors[: len(names)]] == names
    assert [path for path, _ in tensors[: len(names)]] == [name.removesuffix(":0") for name in names]
    for (_, leaf), array in zip(tensors, variables().values(), strict=False):
        np.testing.assert_array_equal(leaf.array(), array)
        assert leaf.role == "parameter"
    assert (checkpoint.format, checkpoint.integrity) == ("stable_baselines2", "crc32")
    golden("\n".join(checkpoint.notes))


@pytest.mark.parametrize("make", [lambda: zipped(), lambda: pickled(variables())], ids=["zip", "pickle"])
def test_settings_and_bounds_are_there(make, tmp_path):
    tree = open_checkpoint(put(tmp_path, make(), "agent")).tree
    data = attr("data")
    assert tree[data, key("gamma")] == ValueLeaf(0.99)
    assert tree[data, key("policy")] == ValueLeaf(Record("stable_baselines.td3.policies.MlpPolicy"))
    low, high = (tree[data, key("action_space"), attr(end)] for end in ("low", "high"))
    assert (low.array().tolist(), high.array().tolist(), low.role) == ([-2.0], [2.0], "other")
    assert tree[data, key("observation_space"), attr("high")].key == "data.observation_space.high"
    assert tree[data, key("target_entropy")].array() == np.float32(-1)
    assert tree[data, key("policy_kwargs"), key("layers"), index(0)] == ValueLeaf(64)
    assert tree.containers[data, key("action_space")].name == "gym.spaces.box.Box"


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_both_forms_of_parameters_in_a_pickle(protocol, tmp_path, golden):
    named = open_checkpoint(put(tmp_path, pickled(collections.OrderedDict(variables()), protocol), "a"))
    listed = open_checkpoint(put(tmp_path, pickled(list(variables().values()), protocol), "b"))
    for number, (name, array) in enumerate(variables().items()):
        path = tuple(attr(part) for part in name.removesuffix(":0").split("/"))
        np.testing.assert_array_equal(named.tree[path].array(), array)
        assert (named.tree[path].key, named.tree[path].role) == (name, "parameter")
        leaf = listed.tree[attr("params"), index(number)]
        np.testing.assert_array_equal(leaf.array(), array)
        assert (leaf.key, leaf.role, leaf.shape) == (f"params.{number}", "parameter", array.shape)
    golden(listed.notes[-1])


def test_names_that_differ_in_their_output_number_only(tmp_path):
    arrays = {"a/w:0": np.ones(2, "f4"), "a/w": np.zeros(2, "f4"), "b": np.ones(1)}
    assert arrays_of(put(tmp_path, zipped(arrays, b"{}"))).keys() == arrays.keys()


def test_functions_are_inert_and_their_constants_readable(tmp_path):
    cloudpickle = pytest.importorskip("cloudpickle")

    def linear(initial):
        return lambda progress: progress * initial

    text = base64.b64encode(cloudpickle.dumps(linear(0.00025), protocol=4)).decode()
    data = json.dumps({"learning_rate": {":type:": "<class 'function'>", ":serialized:": text}}).encode()
    tree = open_checkpoint(put(tmp_path, zipped(data=data))).tree
    below = tree.below((attr("data"), key("learning_rate")))
    records = {leaf.value for _, leaf in below.plain() if isinstance(leaf.value, Record)}
    assert Record("cloudpickle.cloudpickle._make_cell", "0.00025") in records
    assert any(record.name == "types.CodeType" and "<lambda>" in record.summary for record in records)


def test_classes_by_value_do_not_hide_the_weights(tmp_path):
    cloudpickle = pytest.importorskip("cloudpickle")

    class Custom(collections.namedtuple("Custom", "a b")):
        """A policy of somebody's notebook."""

        @property
        def half(self):
            return self.a / 2

        @classmethod
        def one(cls):
            return cls(1, 2)

        @staticmethod
        def two():
            return 2

    data = {"policy": Custom, "nothing": type(None), "_vectorize_action": False}
    path = put(tmp_path, cloudpickle.dumps((data, variables())), "agent.pkl")
    assert arrays_of(path).keys() >= variables().keys()


def test_saved_statistics(tmp_path):
    value = instance(MEAN_STD, mean=np.zeros(20), var=np.ones(20), count=100.0)
    with importable(MEAN_STD):
        path = put(tmp_path, pickle.dumps(value, 4), "obs_rms.pkl")
    checkpoint = open_checkpoint(path)
    assert checkpoint.format == "stable_baselines2"
    assert [(display(at), leaf.role) for at, leaf in checkpoint.tree.tensors()] == [
        ("mean", "buffer"),
        ("var", "buffer"),
    ]


def test_one_array_twice_is_an_alias(tmp_path):
    array = np.arange(100.0)
    tree = open_checkpoint(put(tmp_path, pickle.dumps({"a": array, "b": [array]}), "x")).tree
    assert [display(path) for path, _ in tree.tensors()] == ["a"]
    assert tree.aliases[(key("a"),)][0].key == "b.0"


def test_arrays_of_other_layouts(tmp_path):
    arrays = {
        "fortran": np.asfortranarray(np.arange(200, dtype="f4").reshape(10, 20)),
        "big": np.arange(50, dtype=">f8"),
        "both": np.asfortranarray(np.arange(6, dtype=">i2").reshape(2, 3)),
        "complex": (np.arange(20) + 1j).astype(">c8"),
        "empty": np.zeros((0, 3), "f4"),
        "scalar": np.int64(5),
        "true": np.bool_(True),
    }
    for protocol in (2, 3, 4, 5):
        read_back = arrays_of(put(tmp_path, pickle.dumps(arrays, protocol), "x.pkl"))
        for name, array in arrays.items():
            np.testing.assert_array_equal(read_back[name], array, name)


def test_objects_text_and_records_are_shown_not_decoded(tmp_path):
    value = {"o": np.array([{"a": 1}, None]), "u": np.array(["x"]), "s": np.zeros(2, [("x", "f4")])}
    tree = open_checkpoint(put(tmp_path, pickle.dumps(value, 4), "x.pkl")).tree
    assert tree[key("o"), index(0), key("a")] == ValueLeaf(1)
    assert isinstance(tree[(key("u"),)], ValueLeaf)
    assert not list(tree.tensors())


def test_a_large_array_is_a_span_of_the_file(tmp_path):
    path = put(tmp_path, pickle.dumps({"a": np.zeros(1 << 20)}, 4), "x.pkl")
    leaf = open_checkpoint(path).tree[(key("a"),)]
    assert isinstance(leaf, Leaf)
    assert leaf.source.file.path == path  # type: ignore[attr-defined]
    assert len(pickle.dumps(leaf)) < 1000


@pytest.mark.parametrize("data", [data for data, _ in ACTING.values()], ids=ACTING)
def test_pickles_that_act_are_listed_and_named(data, tmp_path, monkeypatch, golden):
    acted: list[int] = []
    monkeypatch.setattr(os, "getcwd", lambda: acted.append(1) or "/")
    hidden = b"\x80\x04]X\x11\x00\x00\x00stable_baselines.a" + data[:-1] + b"a."
    plain = b"\x80\x02" + data
    text = json.dumps({"x": {":type:": "", ":serialized:": base64.b64encode(plain).decode()}}).encode()
    for name, content in (("a.pkl", hidden), ("b.pkl", plain), ("c.zip", zipped(data=text))):
        checkpoint = open_checkpoint(put(tmp_path, content, name))
        [called_by_it] = dangerous_calls(checkpoint.code_references)
        assert any(called_by_it in note for note in audit_notes(checkpoint.code_references))
        golden("\n".join(audit_notes(checkpoint.code_references)))
    assert not acted


DEEP = b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b"."
SHARED = b"\x80\x02]q\x00" + b"".join(
    b"0](h" + bytes((n,)) + b"h" + bytes((n,)) + b"e" + b"q" + bytes((n + 1,)) for n in range(30)
) + b"."  # fmt: skip
HOSTILE = {
    "100,000 levels": DEEP,
    "cut": pickle.dumps(list(range(99)), 4)[:-3],
    "bytes behind": pickle.dumps([1], 4) + b"more",
    "an array that its bytes do not fill": pickle.dumps(np.zeros(100), 4).replace(
        b"K\x64\x85", b"K\x65\x85", 1
    ),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_hostile_pickles_get_one_sentence(data, tmp_path, golden):
    with pytest.raises(FormatError) as caught:
        open_checkpoint(put(tmp_path, data, "x.pkl"))
    golden(caught.value)


def test_shared_lists_are_bounded(tmp_path):
    tree = open_checkpoint(put(tmp_path, SHARED, "x.pkl")).tree
    assert len(tree) < 100_000


def test_joblib_is_named(tmp_path):
    data = b"\x80\x04\x8c\x13joblib.numpy_pickle\x94\xff" + bytes(100)
    with pytest.raises(UnsupportedError, match="joblib"):
        open_checkpoint(put(tmp_path, data, "vars.pkl"))


WRONG = {
    "names that are no list": ({"names": b'{"a": 1}'}, FormatError),
    "names that are no JSON": ({"names": b"["}, FormatError),
    "a name without an array": ({"names": b'["model/x:0"]'}, FormatError),
    "a name twice": ({"names": b'["model/log_ent_coef:0", "model/log_ent_coef:0"]'}, FormatError),
    "data that is no dict": ({"data": b"[]"}, FormatError),
    "data 100,000 deep": ({"data": b"[" * 100_000}, FormatError),
    "a number of 5,000 digits": ({"data": b'{"a": ' + b"9" * 5000 + b"}"}, FormatError),
    "no base64": ({"data": b'{"a": {":serialized:": "*"}}'}, FormatError),
    "no pickle": ({"data": b'{"a": {":serialized:": "AAAA"}}'}, FormatError),
    "compressed": ({"method": zipfile.ZIP_DEFLATED}, UnsupportedError),
}


@pytest.mark.parametrize(("change", "error"), WRONG.values(), ids=WRONG)
def test_archives_that_do_not_fit_together(change, error, tmp_path, golden):
    with pytest.raises(error) as caught:
        open_checkpoint(put(tmp_path, zipped(**change)))
    golden(caught.value)
    assert caught.value.file == str(tmp_path / "agent.zip")


def test_arrays_that_are_not_listed_are_told(tmp_path, golden):
    checkpoint = open_checkpoint(put(tmp_path, zipped(names=b'["model/log_ent_coef:0"]')))
    golden(checkpoint.notes[-1])


def test_arrays_that_are_no_tensors_are_shown(tmp_path):
    checkpoint = open_checkpoint(put(tmp_path, zipped({"a:0": np.ones(2), "names": np.array(["x"])}, b"{}")))
    assert checkpoint.tree[attr("params"), key("names")] == ValueLeaf(Record("numpy.ndarray", "<U1[1]"))


def test_a_cut_zip_is_said_to_be_cut(tmp_path, golden):
    whole = zipped()
    with pytest.raises(FormatError) as caught:
        open_checkpoint(put(tmp_path, whole[: len(whole) // 2]))
    golden(caught.value)


def test_other_files_are_not_claimed(tmp_path):
    legacy = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03."
    for data in (legacy, b"", b"\x80", b"N.", b"(text).\n", b"PK\x03\x04"):
        probe = Probe(put(tmp_path, data, "x"))
        assert sb3.sb2_claims(probe) is None
        assert torch_legacy.pickle_claims(probe) is None


@pytest.mark.corpus
@pytest.mark.parametrize("name", ["td3_BipedalWalker-v2.zip", "her_FetchReach-v1.pkl", "dqn_CartPole-v1.pkl"])
def test_real_agents(name):
    truth = json.loads((ZOO / f"{name}.truth.json").read_text())["tensors"]
    checkpoint = open_checkpoint(str(ZOO / name))
    rows = {(row.key, row.sha256) for row in digest_checkpoint(checkpoint).tensors}
    sums = {sha for _, sha in rows}
    for stored, tensor in truth.items():
        assert (stored, tensor["sha256"]) in rows or (stored.startswith("[") and tensor["sha256"] in sums)


@pytest.mark.corpus
def test_a_link_kept_as_text_is_a_text_file(golden):
    with pytest.raises(CkpttoolError) as caught:
        open_checkpoint(str(ZOO / "td3_BipedalWalker-v3.zip.symlinktext"))
    golden(caught.value.message)
