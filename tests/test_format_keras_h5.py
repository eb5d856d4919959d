"""Keras's HDF5 files: listed as Keras lists them, damaged ones refused, ours loaded by Keras."""

from __future__ import annotations

import functools
import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.core import (
    Checkpoint,
    Container,
    FormatError,
    Inline,
    Leaf,
    NotFoundError,
    Tree,
    UnsupportedError,
    ValueLeaf,
    attr,
    display,
)
from ckpttool.core import Path as TreePath
from ckpttool.core.digests import digest_checkpoint
from ckpttool.formats import keras_h5, open_checkpoint, slot_path
from ckpttool.testing.formats import WritingContract
from tests import keras_models, tensorflow_child
from tests.conftest import in_process, refused
from tests.golden_texts import Golden
from tests.keras_referee import assert_slots, assert_variables, sha256, weights
from tests.mutants import require_refused_or_listed
from tests.trees import attributes, leaf, tensorflow_tree

h5py = pytest.importorskip("h5py")
MODELS = keras_models.__file__


def keras3_file(path: Path, *, named: bool = True) -> str:
    """Write what Keras 3 writes for a functional model with two layers and Adam, without Keras."""
    generator = np.random.default_rng(0)

    def group(file: Any, name: str, user: str, arrays: list[np.ndarray]) -> None:
        group = file.create_group(f"{name}/vars" if name else "vars")
        if named:
            group.attrs["name"] = user
        for number, array in enumerate(arrays):
            group[str(number)] = array

    arrays = [generator.standard_normal(shape).astype(np.float32) for shape in ((4, 8), (8,), (8, 2), (2,))]
    slots = [generator.standard_normal(a.shape).astype(np.float32) for a in arrays for _ in range(2)]
    with h5py.File(path, "w") as file:
        group(file, "", "functional", [])
        group(file, "layers/dense", "hidden", arrays[:2])
        group(file, "layers/dropout", "dropout", [])
        group(file, "layers/dense_1", "out", arrays[2:])
        group(file, "optimizer", "adam", [np.int64(7), np.float32(1e-3), *slots])
    return str(path)


class TestKerasH5(WritingContract):
    module = keras_h5

    def make(self, folder: Path) -> str:
        return keras3_file(folder / "model.weights.h5")

    def test_no_flipped_bit_gets_through(self, path: str) -> None:
        # HDF5 has no checksum here, and the format says so; what is damaged is refused or is listed.
        # Each is read by a process of its own; test_hdf5.py damages many more.
        require_refused_or_listed(path, 25)


def test_layers_have_the_users_names_and_slots_their_variables(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(keras3_file(tmp_path / "m.weights.h5"))
    names = [display(path) for path in checkpoint.tree]
    assert names[:4] == ["hidden/kernel", "hidden/bias", "out/kernel", "out/bias"]
    assert names[4:7] == [
        "optimizer/iterations",
        "optimizer/learning_rate",
        "optimizer/slots/m/hidden/kernel",
    ]
    assert checkpoint.tree.containers[(attr("hidden"),)].name == "Dense"
    assert not checkpoint.notes
    assert checkpoint.details["optimizer"] == "Adam"


def test_without_names_stored_ones_are_shown(tmp_path: Path, golden: Golden) -> None:
    # tf_keras writes no names, so what the optimizer is cannot be known either.
    checkpoint = open_checkpoint(keras3_file(tmp_path / "m.weights.h5", named=False))
    assert [display(path) for path in checkpoint.tree][:3] == ["dense/kernel", "dense/bias", "dense_1/kernel"]
    slots = [one for _, one in checkpoint.tree.tensors() if one.role == "slot"]
    assert len(slots) == 8
    assert all(one.of is None for one in slots)
    golden("\n".join(checkpoint.notes))


def legacy(path: Path, layers: dict[str, dict[str, np.ndarray]], prefix: str = "", **attrs: Any) -> str:
    with h5py.File(path, "w") as file:
        top = file.require_group(prefix) if prefix else file
        for name, value in attrs.items():
            file.attrs[name] = value
        _put(top, "layer_names", list(layers))
        for layer, arrays in layers.items():
            group = top.create_group(layer)
            _put(group, "weight_names", list(arrays))
            for name, array in arrays.items():
                group[name] = array
    return str(path)


def _put(group: Any, name: str, values: list[str]) -> None:
    """Do as legacy_h5_format.save_attributes_to_hdf5_group: pieces of at most 64,512 bytes."""
    array = np.array([value.encode() for value in values])
    pieces = 1
    while any(piece.nbytes > 64512 for piece in np.array_split(array, pieces)):
        pieces += 1
    if pieces == 1:
        group.attrs[name] = array
    else:
        for number, piece in enumerate(np.array_split(array, pieces)):
            group.attrs[f"{name}{number}"] = piece


def test_order_is_that_of_the_attributes_even_in_pieces(tmp_path: Path) -> None:
    names = [f"layer_with_quite_a_long_name_{n:05}_{'x' * 80}" for n in reversed(range(600))]
    layers = {name: {f"{name}/kernel:0": np.full((1,), n, np.float32)} for n, name in enumerate(names)}
    path = legacy(tmp_path / "many.h5", layers, keras_version="2.4.0")
    with h5py.File(path) as file:
        assert "layer_names0" in file.attrs
        assert "layer_names" not in file.attrs
    checkpoint = open_checkpoint(path)
    assert [path[0].value for path in checkpoint.tree] == names
    assert checkpoint.writer == "Keras 2.4.0"


def test_keras_1_names(tmp_path: Path) -> None:
    dense = {"dense_1_W:0": np.ones((2, 3)), "dense_1_b:0": np.ones(3)}
    other = {"bn_1_gamma:0": np.ones(3), "bn_1_running_mean:0": np.ones(3)}
    saved = open_checkpoint(legacy(tmp_path / "old.h5", {"dense_1": dense, "flatten": {}, "bn_1": other}))
    assert [display(path) for path in saved.tree] == [
        "dense_1/kernel",
        "dense_1/bias",
        "bn_1/gamma",
        "bn_1/running_mean",
    ]
    assert next(one.key for _, one in saved.tree.tensors()) == "dense_1/dense_1_W:0"
    assert [one.role for _, one in saved.tree.tensors()] == ["parameter"] * 3 + ["buffer"]


def test_a_named_weight_that_is_absent_is_an_error(tmp_path: Path, golden: Golden) -> None:
    path = legacy(tmp_path / "m.h5", {"a": {"a/kernel:0": np.ones(1)}})
    with h5py.File(path, "r+") as file:
        file["a"].attrs["weight_names"] = np.array([b"a/kernel:0", b"a/lost:0"])
    with pytest.raises(FormatError) as caught:
        open_checkpoint(path)
    golden(caught.value)
    with h5py.File(path, "r+") as file:
        file.attrs["layer_names"] = np.array([b"b", b"a"])
    with pytest.raises(FormatError) as caught:
        open_checkpoint(path)
    golden(caught.value)


LAMBDA = {"class_name": "Lambda", "config": {"name": "evil", "function": ["4wEAAA==", None, None]}}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param("{", id="cut JSON"),
        pytest.param("[1]", id="JSON list"),
        pytest.param('{"class_name": 3, "config": []}', id="class of another type"),
        pytest.param(
            '{"class_name": "Sequential", "config": {"layers": [7, {"class_name": "X", "config": 1}]}}',
            id="layers of other types",
        ),
        pytest.param(json.dumps({"class_name": "Sequential", "config": [LAMBDA]}), id="Lambda"),
    ],
)
def test_a_configuration_is_data(tmp_path: Path, config: str, golden: Golden) -> None:
    path = legacy(tmp_path / "m.h5", {"a": {"a/kernel:0": np.ones(1)}}, "model_weights")
    with h5py.File(path, "r+") as file:
        # A long text needs the form that h5py gives to variable strings.
        file.attrs.create("model_config", config, dtype=h5py.string_dtype())
    checkpoint = open_checkpoint(path)
    assert [one.key for _, one in checkpoint.tree.tensors()] == ["model_weights/a/a/kernel:0"]
    golden("\n".join(checkpoint.notes))


def test_a_file_of_something_else_is_its_datasets(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "dump.hdf5", "w") as file:
        file["params/mean"] = np.arange(3.0)
        file["count"] = 3
        file["again"] = file["count"]
    checkpoint = open_checkpoint(str(tmp_path / "dump.hdf5"))
    assert {one.key for _, one in checkpoint.tree.tensors()} == {"params/mean", "again"}
    assert checkpoint.details["layout"] == "datasets"
    ((aliases),) = checkpoint.tree.aliases.values()
    assert [alias.key for alias in aliases] == ["count"]


# By name, the names of layers that a program other than Keras writes, and its groups of weights.
NAMES: dict[str, tuple[list[str], list[str]]] = {
    "groups": (["0", "2"], ["0", "2"]),
    "names of other groups": (["fc1", "fc2"], ["0", "2"]),
    "fewer": (["0"], ["0", "2"]),
    "more": (["0", "2", "4"], ["0", "2"]),
    "none": ([], ["0", "2"]),
    "nested": (["0", "2"], ["net/0", "net/2"]),
    "in the group of weights": (["0", "2"], ["model_weights/0", "model_weights/2"]),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_layers_alone_do_not_make_a_keras_file(tmp_path: Path, name: str) -> None:
    names, groups = NAMES[name]
    file = tmp_path / "x.h5"
    with h5py.File(file, "w") as archive:
        for at, group in enumerate(groups):
            archive[f"{group}/weight"] = np.arange(6, dtype=np.float32).reshape(3, 2) + at
            archive[f"{group}/bias"] = np.arange(3, dtype=np.float64) * at
        archive["steps"] = np.int64(7)
        owner = archive.get("model_weights", archive)
        owner.attrs["layer_names"] = np.array([name.encode() for name in names], "S4")
    expected = {}
    with h5py.File(file) as archive:
        archive.visititems(
            lambda path, item: expected.update({path: item[()]}) if isinstance(item, h5py.Dataset) else None
        )
    checkpoint = open_checkpoint(str(file))
    assert checkpoint.details["layout"] == "datasets"
    assert {display(path): one.role for path, one in checkpoint.tree.tensors()} == dict.fromkeys(
        expected, "parameter"
    )
    for path, one in checkpoint.tree.tensors():
        value = np.asarray(expected[display(path)])
        assert (one.shape, one.dtype, bytes(one.source.read())) == (
            value.shape,
            value.dtype.name,
            value.tobytes(),
        )


@pytest.mark.parametrize("mark", ["keras_version", "backend", "model_config", "weight_names"])
def test_a_layer_that_keras_lists_must_be_there(tmp_path: Path, mark: str) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as archive:
        archive.attrs["layer_names"] = np.array([b"0", b"2"])
        archive["0/weight"] = np.ones(3, np.float32)
        (archive["0"] if mark == "weight_names" else archive).attrs[mark] = (
            np.array([b"weight"]) if mark == "weight_names" else "{}"
        )
    with pytest.raises(FormatError):
        open_checkpoint(str(tmp_path / "x.h5"))


def test_shards_are_one_checkpoint(tmp_path: Path, golden: Golden) -> None:
    keras3_file(tmp_path / "whole.weights.h5")
    for number, keep in enumerate(("layers", "optimizer")):
        shutil.copy(tmp_path / "whole.weights.h5", tmp_path / f"m_0000{number}.weights.h5")
        with h5py.File(tmp_path / f"m_0000{number}.weights.h5", "r+") as file:
            for name in set(file) - {keep, "vars"}:
                del file[name]
    where = {"/layers/dense/vars": ["m_00000.weights.h5"], "/optimizer/vars": "m_00001.weights.h5"}
    (tmp_path / "m.weights.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    checkpoint = open_checkpoint(str(tmp_path / "m.weights.json"))
    whole = open_checkpoint(str(tmp_path / "whole.weights.h5"))
    assert list(checkpoint.tree) == list(whole.tree)
    assert digest_checkpoint(checkpoint).sha256 == digest_checkpoint(whole).sha256
    assert len(checkpoint.files) == 3
    (tmp_path / "m_00001.weights.h5").unlink()
    with pytest.raises(NotFoundError):
        open_checkpoint(str(tmp_path / "m.weights.json"))
    for name in ("../x.h5", "/etc/passwd", "", 3, "a/b"):
        text = json.dumps({"weight_map": {"/vars": [name]}})
        (tmp_path / "m.weights.json").write_text(text)
        with pytest.raises(FormatError) as caught:
            open_checkpoint(str(tmp_path / "m.weights.json"))
        golden(caught.value)


# -- the writer


def put(tree: Tree, path: Path, **options: Any) -> str:
    (piece,) = keras_h5.pieces(tree, **options)
    with open(path, "wb") as stream:
        piece.write(stream)
    return str(path)


def test_a_tree_of_another_framework_gets_keras_places(tmp_path: Path) -> None:
    arrays = {
        "policy/actor/l1/_kernel": np.ones((3, 4), np.float32),
        "policy/actor/l1/bias": np.ones(4, np.float32),
        "policy/critic/_functional/_operations/1/_kernel": np.ones((3, 1), np.float32),
        "policy/critic/_functional/_operations/1/bias": np.ones(1, np.float32),
        "policy/critic/_functional/_operations/2/gamma": np.ones(1, np.float32),
        "policy/critic/_functional/_operations/2/beta": np.ones(1, np.float32),
        "policy/critic/_functional/_operations/3/_kernel": np.ones((1, 1), np.float32),
        "policy/log_std/value": np.ones(1, np.float32),
    }
    tree = tensorflow_tree(arrays)
    checkpoint = open_checkpoint(put(tree, tmp_path / "m.weights.h5", root="policy"))
    assert [one.key for _, one in checkpoint.tree.tensors()] == [
        "actor/l1/vars/0",
        "actor/l1/vars/1",
        "critic/layers/dense/vars/0",
        "critic/layers/dense/vars/1",
        "critic/layers/layer_normalization/vars/0",
        "critic/layers/layer_normalization/vars/1",
        "critic/layers/dense_1/vars/0",
        "log_std/vars/0",
    ]
    assert list(keras_h5.stored(tree, root="policy")) == list(checkpoint.tree)
    # bias before kernel in the tree, kernel first in the file
    turned = Tree(dict(reversed(list(tree.items())[:2])))
    assert digest_checkpoint(open_checkpoint(put(turned, tmp_path / "t.h5", root="policy"))).tensors[
        0
    ].shape == (
        3,
        4,
    )


def test_bfloat16_bool_and_complex_come_back(tmp_path: Path) -> None:
    import ml_dtypes

    arrays = {
        "a": np.array([1.5, -2], ml_dtypes.bfloat16),
        "b": np.array([True, False]),
        "c": np.array([1 + 2j], np.complex64),
        "d": np.zeros((0, 3), np.float16),
        "e": np.array(7, np.uint16),
    }
    tree = Tree({attributes(f"x{name}/kernel"): leaf(array) for name, array in arrays.items()})
    checkpoint = open_checkpoint(put(tree, tmp_path / "m.weights.h5"))
    for (_, one), array in zip(checkpoint.tree.tensors(), arrays.values(), strict=True):
        assert (one.dtype, one.shape) == (array.dtype.name, array.shape)
        assert bytes(one.read()) == array.tobytes()


@pytest.mark.parametrize("rate", [True, False])
def test_a_learning_rate_that_a_schedule_computes_is_no_variable(tmp_path: Path, rate: bool) -> None:
    path, at = attributes("l1/kernel"), attributes("optimizer")
    moments = {
        slot_path(at, kind, path): replace(leaf(np.ones((2, 2), np.float32)), role="slot", of=path, slot=kind)
        for kind in ("m", "v")
    }
    tree = Tree(
        {
            path: leaf(np.ones((2, 2), np.float32)),
            (*at, attr("_iterations")): replace(leaf(np.array(3)), role="counter"),
            **({(*at, attr("_learning_rate")): leaf(np.array(0.5, np.float32))} if rate else {}),
            **moments,
        }
    )
    read_back = open_checkpoint(put(tree, tmp_path / "m.weights.h5")).tree
    assert ((*at, attr("learning_rate")) in read_back) is rate
    assert sum(one.role == "slot" for _, one in read_back.tensors()) == 2


def test_what_has_no_place_is_refused_before_anything_is_written(golden: Golden) -> None:
    kernel = leaf(np.ones((2, 2), np.float32))
    path, at = attributes("l1/kernel"), attributes("optimizer")
    slot = {slot_path(at, "m", path): Leaf("float32", (2, 2), Inline(bytes(16)), "", "slot", path, "m")}
    for tree in (
        Tree({path: kernel, attributes("n"): ValueLeaf(3)}),
        Tree({path: Leaf("string", (), Inline(bytes(8)), "s")}),
        Tree({path: Leaf("float8_e5m2", (1,), Inline(bytes(1)), "s")}),
        Tree({path: kernel, **slot}),
        Tree({(attr("a/b"), attr("kernel")): kernel}),
        Tree({attributes("net/0/what"): kernel}),
        Tree({path: kernel, attributes("o/x"): Leaf("float32", (1,), Inline(bytes(4)), "", "slot")}),
    ):
        with pytest.raises(UnsupportedError) as caught:
            keras_h5.pieces(tree)
        golden(caught.value)


# -- Keras as the referee


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """What Keras 3 saved, and what tf_keras did where it is installed."""
    tensorflow_child.require("keras", "tensorflow")
    programs = ["build", *(["build_tf_keras"] if importlib.util.find_spec("tf_keras") else [])]
    folders = {name: tmp_path_factory.mktemp(name) for name in programs}
    results = tensorflow_child.run_each(MODELS, folders, once=True)
    return {name: (folders[name], facts) for name, facts in results.items()}


@pytest.fixture(scope="module")
def built(both: dict[str, tuple[Path, dict[str, Any]]]) -> tuple[Path, dict[str, Any]]:
    return both["build"]


@functools.cache
def opened(path: Path) -> Checkpoint:
    """Read a file of the folder above, which nobody changes, once: each reading starts a process."""
    return open_checkpoint(str(path))


@pytest.mark.tensorflow
def test_keras_3_and_we_see_the_same_variables(built: tuple[Path, dict[str, Any]]) -> None:
    folder, facts = built
    for name, fact in facts.items():
        for end in (".weights.h5", "_shards.weights.json", ".keras", ".h5"):
            if (folder / f"{name}{end}").exists():
                checkpoint = opened(folder / f"{name}{end}")
                assert_variables(checkpoint, fact, named=end in (".keras", ".h5"))


# What is known of slots without a configuration: all, or (another order could not be told) none.
UNKNOWN = {"agent", "actor", "vision", "opt_rmsprop_all"}


@pytest.mark.tensorflow
def test_keras_3_and_we_give_slots_to_the_same_variables(built: tuple[Path, dict[str, Any]]) -> None:
    folder, facts = built
    for name, fact in facts.items():
        count = len(fact["optimizer"]) - (3 if name == "opt_nadam" else 2)
        for end in (".keras", ".h5"):
            if (folder / f"{name}{end}").exists():
                assert assert_slots(opened(folder / f"{name}{end}"), fact) == count, (name, end)
        known = assert_slots(opened(folder / f"{name}.weights.h5"), fact)
        assert known == (0 if name in UNKNOWN else count), name


@pytest.mark.tensorflow
def test_keras_3_names_what_it_saved(built: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = built
    vision = opened(folder / "vision.keras")
    names = {display(path): one for path, one in vision.tree.tensors()}
    assert names["pixels/kernel"].shape == (2, 2, 2, 3)
    assert names["batch_normalization/moving_mean"].role == "buffer"
    assert names["inner/frozen/kernel"].trainable is False
    assert vision.tree.containers[attributes("pixels")].state["filters"] == 3  # type: ignore[index]
    actor = weights(opened(folder / "actor.weights.h5"))
    assert {"l1/kernel", "blocks/first/kernel", "a_last/bias", "vars/0"} <= actor.keys()
    half = opened(folder / "half.weights.h5")
    assert [one.dtype for _, one in half.tree.tensors()][:3] == ["bfloat16", "bfloat16", "float32"]


def _named(checkpoint: Any, fact: dict[str, Any], names: list[str]) -> Tree:
    """Return the model's variables under other paths, in Keras's order, as if from another format."""
    by_digest = {sha256(one): one for _, one in checkpoint.tree.tensors()}
    leaves: dict[TreePath, Leaf | ValueLeaf] = {}
    for name, variable in zip(names, fact["variables"], strict=True):
        one = by_digest[variable["sha256"]]
        leaves[attributes(name)] = Leaf(one.dtype, one.shape, one.source, name)
    return Tree(leaves)


@pytest.mark.tensorflow
def test_keras_3_loads_what_we_write(built: tuple[Path, dict[str, Any]]) -> None:
    folder, facts = built
    for name in ("agent", "plain", "actor", "vision", "words", "half"):
        checkpoint = opened(folder / f"{name}.weights.h5")
        put(checkpoint.tree, folder / f"ours_{name}.weights.h5")
    dense = [f"{layer}/{part}" for layer in "zma" for part in ("kernel", "bias")]
    plain = opened(folder / "plain.weights.h5")
    tree = dict(_named(plain, facts["plain"], dense))
    state = {v["path"].partition("/")[2]: v["sha256"] for v in facts["plain"]["optimizer"]}
    by_digest = {sha256(one): one for _, one in plain.tree.tensors()}
    at = attributes("optimizer")
    for name, role in (("iteration", "counter"), ("learning_rate", "other")):
        one = by_digest[state[name]]
        tree[*at, attr(name)] = Leaf(one.dtype, one.shape, one.source, name, role)  # type: ignore[arg-type]
    for name, variable in zip(dense, facts["plain"]["variables"], strict=True):
        for kind, word in (("m", "momentum"), ("v", "velocity")):
            one = by_digest[state[f"{variable['path'].replace('/', '_')}_{word}"]]
            path = slot_path(at, kind, attributes(name))
            tree[path] = Leaf(one.dtype, one.shape, one.source, "", "slot", attributes(name), kind)
    # A tree may have the bias before its kernel; Keras's order is its own.
    items = list(tree.items())
    turned = [items[number] for number in (1, 0, 3, 2, 5, 4)]
    put(Tree(dict(turned + items[6:])), folder / "mapped_plain.weights.h5")
    actor = ["l1", "blocks/0", "blocks/1", "a_last"]
    names = ["actor/scale", *(f"actor/{one}/{part}" for one in actor for part in ("kernel", "bias"))]
    names += [
        "critic/0/kernel",
        "critic/0/bias",
        "critic/1/gamma",
        "critic/1/beta",
        "critic/2/kernel",
        "critic/2/bias",
    ]
    tree = dict(_named(opened(folder / "agent.weights.h5"), facts["agent"], names))
    blocks = {attributes("actor/blocks"): Container("list")}
    put(Tree(tree, containers=blocks), folder / "mapped_agent.weights.h5")

    loaded = tensorflow_child.run(MODELS, "load", folder)
    assert len(loaded) == 8
    for file, fact in loaded.items():
        name = file.partition("_")[2]
        keep = ("sha256", "shape", "dtype")
        own_variables = [{key: one[key] for key in keep} for one in fact["variables"]]
        assert own_variables == [{key: one[key] for key in keep} for one in facts[name]["variables"]], file
        if file != "mapped_agent":
            assert [v["sha256"] for v in fact["optimizer"]] == [v["sha256"] for v in facts[name]["optimizer"]]


@pytest.mark.tensorflow
def test_tf_keras_and_we_agree(both: dict[str, tuple[Path, dict[str, Any]]]) -> None:
    if "build_tf_keras" not in both:
        pytest.skip("tf_keras is not installed")
    folder, facts = both["build_tf_keras"]
    for name, fact in facts.items():
        variables = {digest: variable for variable, digest in fact["variables"]}
        state: dict[str, list[str]] = {}
        for slot, digest in fact["optimizer"]:
            state.setdefault(digest, []).append(slot)
        for end in (".h5", ".keras", ".weights.h5", "_weights.h5"):
            if not (folder / f"{name}{end}").exists():
                continue
            saved = open_checkpoint(str(folder / f"{name}{end}"))
            own = weights(saved)
            assert sorted(own.values()) == sorted(variables)
            if end != ".weights.h5":
                names = {n.removeprefix("inner/"): variables[d].removesuffix(":0") for n, d in own.items()}
                assert all(n == stored_name for n, stored_name in names.items())
            slots = [one for _, one in saved.tree.tensors() if one.role == "slot" and one.of is not None]
            assert len(slots) == (len(fact["optimizer"]) - 1 if end in (".h5", ".keras") else 0), (name, end)
            for one in slots:
                assert one.of is not None
                owner = variables[sha256(saved.tree[one.of])].removesuffix(":0")  # type: ignore[arg-type]
                assert any(owner in slot for slot in state[sha256(one)])


# -- the corpus and the command


@pytest.mark.corpus
def test_the_corpus_is_read(corpus: Path) -> None:
    files = [*(corpus / "tf").rglob("*.h5f"), *(corpus / "tf").rglob("*.keras")]
    assert len(files) == 8
    for file in files:
        truth = json.loads(file.with_name(f"{file.name}.truth.json").read_text())
        known = truth.get("model.weights.h5", truth)["tensors"]
        digest = digest_checkpoint(open_checkpoint(str(file)))
        assert {t.key: t.sha256 for t in digest.tensors} == {key: one["sha256"] for key, one in known.items()}
        assert digest.format == (keras_h5.ARCHIVE_NAME if file.suffix == ".keras" else keras_h5.NAME)


def test_the_command_lists_and_refuses(tmp_path: Path) -> None:
    path = keras3_file(tmp_path / "m.weights.h5")
    document = in_process("inspect", path, "--json").json()
    assert document["format"] == "keras_h5"
    assert {row["path"] for row in document["tensors"]} >= {"hidden/kernel", "optimizer/slots/v/out/bias"}
    Path(path).write_bytes(Path(path).read_bytes()[:3000])
    refused(in_process("digest", path))
    error = in_process("digest", path, "--json").json()["error"]
    assert (error["kind"], error["file"]) == ("truncated", path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layer_names", "dense"),
        ("layer_names", 7),
        ("layer_names", np.array([[b"dense"]])),
        ("layer_names", np.array([b"\xff"])),
        ("layer_names0", "dense"),
    ],
)
def test_names_that_are_no_list_of_texts_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["dense/kernel"] = 1.0
        file.attrs[name] = value
        file.attrs["backend"] = "tensorflow"
    with pytest.raises(FormatError):
        open_checkpoint(str(tmp_path / "x.h5"))


def test_a_layer_named_as_the_group_of_weights(tmp_path: Path) -> None:
    # Keras looks into that group only where the root names no layers (legacy_h5_format.py, load_weights).
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.attrs["layer_names"] = [b"model_weights"]
        group = file.create_group("model_weights")
        group.attrs["weight_names"] = [b"kernel:0"]
        group["kernel:0"] = np.arange(3.0)
    (leaf,) = (leaf for _, leaf in open_checkpoint(str(tmp_path / "x.h5")).tree.tensors())
    assert (leaf.key, leaf.role) == ("model_weights/kernel:0", "parameter")


def test_texts_that_are_not_utf8_are_spelled_out(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["dense/kernel:0"] = 1.0
        file["dense"].attrs["weight_names"] = [b"kernel:0"]
        file.attrs["layer_names"] = [b"dense"]
        text = h5py.h5t.C_S1.copy()
        text.set_size(h5py.h5t.VARIABLE)
        attribute = h5py.h5a.create(file.id, b"model_config", text, h5py.h5s.create(h5py.h5s.SCALAR))
        attribute.write(np.array(b"{\xff\x1b", object))
    checkpoint = open_checkpoint(str(tmp_path / "x.h5"))
    assert len(checkpoint.tree) == 1
    assert any("model_config" in note for note in checkpoint.notes)


def test_an_optimizer_can_be_the_whole_file(tmp_path: Path) -> None:
    """What `optimizer.save_own_variables` writes: a counter, a rate and moments, without a model."""
    path = tmp_path / "optimizer.weights.h5"
    with h5py.File(path, "w") as file:
        vars_ = file.create_group("vars")
        moments = [np.full((4, 8), n, np.float32) for n in range(2)]
        for number, array in enumerate([np.int64(7), np.float32(1e-3), *moments]):
            vars_[str(number)] = array
    tree = open_checkpoint(str(path)).tree
    arrays = {leaf.key: leaf.array().tolist() for _, leaf in tree.tensors()}
    assert 7 in arrays.values()
    assert moments[1].tolist() in arrays.values()
    assert in_process("inspect", path).status == 0
    assert in_process("convert", path, tmp_path / "out.pt").status == 2
    assert not (tmp_path / "out.pt").exists()


def test_the_numbers_of_a_list_give_its_order_and_not_the_addresses(tmp_path: Path) -> None:
    # HDF5 reuses freed space: a later object may have a lower address.
    file = tmp_path / "x.weights.h5"
    with h5py.File(file, "w") as archive:
        for name in ("dense_2", "dense", "layer_normalization_1", "dense_1", "layer_normalization"):
            archive[f"layers/{name}/vars/0"] = np.ones((2, 2) if "dense" in name else 2, np.float32)
        archive.create_group("vars")
    names = [path.split("/")[0] for path in map(display, open_checkpoint(str(file)).tree)]
    for name in ("dense", "layer_normalization"):
        own = [layer_name for layer_name in names if layer_name.startswith(name)]
        assert own == sorted(own, key=lambda item: (len(item), item))
