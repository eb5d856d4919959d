"""Whose orientation arrays have: by names, shapes and metadata, never by the container's name."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckpttool.commands.convert import convert
from ckpttool.conversion.filling import load_into, model_source
from ckpttool.conversion.write import save
from ckpttool.core import Inline, Leaf, MappingError, Tree, UsageError, attr, display, index
from ckpttool.formats import open_checkpoint
from ckpttool.mapping import find_layers, orientation
from tests import v1_writer as v1

Arrays = dict[str, np.ndarray]


def array(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


TORCH = {"l1.weight": array(4, 3), "l1.bias": array(4), "l2.weight": array(4, 4), "l2.bias": array(4)}
KERAS = {"l1/kernel": array(3, 4), "l1/bias": array(4), "l2/kernel": array(4, 4), "l2/bias": array(4)}
FLAX = {"params/l1/kernel": array(3, 4), "params/l1/bias": array(4)}
HAIKU = {"mlp/l1/w": array(3, 4), "mlp/l1/b": array(4)}
OWN_CLASS = {"l1.weight": array(3, 4), "l1.bias": array(4)}
SQUARES = {"W1": array(4, 4), "b1": array(4), "W2": array(4, 4), "b2": array(4)}
MIXED = {"l1.weight": array(4, 3), "l2.kernel": array(4, 4)}


def written(folder: Path, arrays: Arrays, container: str) -> str:
    """Write the arrays into a container; `safetensors:tf` has that word as its metadata's format."""
    kind, _, writer = container.partition(":")
    file = folder / f"source.{kind}"
    if kind == "npz":
        np.savez(file, **arrays)
    elif kind == "pkl":
        file.write_bytes(pickle.dumps(arrays))
    elif kind == "h5":
        h5py = pytest.importorskip("h5py")
        with h5py.File(file, "w") as archive:
            for name, value in arrays.items():
                archive[name] = value
    else:
        library = pytest.importorskip("safetensors.numpy")
        library.save_file(arrays, file, metadata={"format": writer} if writer else None)
    return str(file)


ANY = ("npz", "pkl", "safetensors")


@pytest.mark.parametrize("container", [*ANY, "safetensors:pt", "safetensors:mlx"])
def test_torch_names_are_transposed_for_tensorflow_from_any_container(container: str, tmp_path: Path) -> None:
    source = written(tmp_path, TORCH, container)
    done = convert(source, str(tmp_path / "out-1"), to="tf", layout="none")
    rules = {move.source.replace(".", "/"): move.rule for move in done.report.mapped}
    assert rules == {
        "l1/weight": "transpose",
        "l1/bias": "keep",
        "l2/weight": "transpose",
        "l2/bias": "keep",
    }
    kept = convert(source, str(tmp_path / "out.pt"), to="torch", layout="none")
    assert {move.rule for move in kept.report.mapped} == {"keep"}


@pytest.mark.parametrize("container", [*ANY, "safetensors:tf", "safetensors:flax", "safetensors:pt", "h5"])
@pytest.mark.parametrize("arrays", [KERAS, FLAX, HAIKU], ids=["keras", "flax", "haiku"])
def test_kernels_are_transposed_for_torch_from_any_container(
    arrays: Arrays, container: str, tmp_path: Path
) -> None:
    source = written(tmp_path, arrays, container)
    done = convert(source, str(tmp_path / "out.pt"), to="torch", layout="none")
    rules = {move.source: move.rule for move in done.report.mapped}
    assert {name: rules[name] for name in arrays} == {
        name: "transpose" if value.ndim == 2 else "keep" for name, value in arrays.items()
    }
    kept = convert(source, str(tmp_path / "out-1"), to="tf", layout="none")
    assert {move.rule for move in kept.report.mapped} == {"keep"}


def test_torch_names_in_a_handmade_hdf5_file_are_torch(tmp_path: Path) -> None:
    source = written(tmp_path, TORCH, "h5")
    assert model_source(open_checkpoint(source), None).framework == "torch"
    assert convert(source, str(tmp_path / "out.pt"), to="torch", layout="none").written


@pytest.mark.parametrize("container", ANY)
@pytest.mark.parametrize("to", ["torch", "tf"])
@pytest.mark.parametrize("arrays", [OWN_CLASS, SQUARES, MIXED], ids=["own class", "squares", "mixed"])
def test_without_evidence_the_conversion_is_refused(
    arrays: Arrays, to: str, container: str, tmp_path: Path
) -> None:
    source = written(tmp_path, arrays, container)
    target = tmp_path / ("out.pt" if to == "torch" else "out-1")
    with pytest.raises(MappingError) as caught:
        convert(source, str(target), to=to, layout="none")
    assert "--from torch" in str(caught.value.hint)
    assert caught.value.path
    assert not target.exists()
    with pytest.raises(MappingError):
        model_source(open_checkpoint(source), None)
    # The hint works.
    assert convert(source, str(target), to=to, layout="none", from_=to).written


def test_metadata_is_enough_for_a_copy_and_not_for_a_transposition(tmp_path: Path) -> None:
    source = written(tmp_path, OWN_CLASS, "safetensors:pt")
    assert convert(source, str(tmp_path / "out.pt"), to="torch", layout="none").written
    with pytest.raises(MappingError):
        convert(source, str(tmp_path / "out-1"), to="tf", layout="none")
    with pytest.raises(UsageError):
        convert(source, str(tmp_path / "out-1"), to="tf", layout="none", from_="jax")


def test_arrays_that_are_no_layers_are_copied(tmp_path: Path) -> None:
    source = written(tmp_path, {"obs": array(9, 3), "act": array(9, 2)}, "npz")
    assert convert(source, str(tmp_path / "out.pt"), to="torch").written
    assert convert(source, str(tmp_path / "out-1"), to="tf").written


def test_a_square_matrix_beside_a_turned_one_is_refused_until_its_kind_is_given(tmp_path: Path) -> None:
    """One matrix shows that the program has layers of its own: its square ones may be such layers too."""
    torch = pytest.importorskip("torch")
    module = {"a/kernel": array(4, 4), "a/bias": array(4), "b/kernel": array(3, 4), "b/bias": array(3)}
    source = written(tmp_path, module, "npz")
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 3)})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(MappingError) as refused:
        load_into(model, source)
    assert refused.value.path == "a"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for kind, expected in (("dense_out_in", module["a/kernel"]), ("dense", module["a/kernel"].T)):
        assert f"'a={kind}'" in str(refused.value.hint)
        target = str(tmp_path / f"{kind}.pt")
        convert(source, target, to="torch", layout="none", kinds=[f"a={kind}"])
        load_into(model, target)
        np.testing.assert_array_equal(model["a"].weight.detach().numpy(), expected)
        np.testing.assert_array_equal(model["b"].weight.detach().numpy(), module["b/kernel"])


def test_two_vectors_without_a_class_are_a_norm_by_assumption(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for name, assumed in (("scale", True), ("layer_norm", False), ("ln_1", False)):
        rows = {f"{name}/gamma": array(4), f"{name}/beta": array(4)}
        module = {"a/kernel": array(3, 4), "a/bias": array(4), **rows}
        folder = tmp_path / name
        folder.mkdir()
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 4), name: torch.nn.LayerNorm(4)})
        done = load_into(model, written(folder, module, "npz"))
        assert any(sentence.startswith(f"{name}: two") for sentence in done.report.assumed) == assumed


# Arrays that only numbers name.
DENSE = [array(3, 5), array(5), array(5, 5), array(5), array(5, 2), array(2)]
CONVOLUTIONS = [array(3, 3, 2, 4), array(4), *[array(4)] * 4, array(4, 3), array(3)]
LSTM = [array(3, 16), array(4, 16), array(16), array(4, 2), array(2)]
TORCH_LSTM = [array(16, 3), array(16, 4), array(16), array(16), array(2, 4), array(2)]
ROWS = {"dense": DENSE, "convolutions": CONVOLUTIONS, "lstm": LSTM}


def row(folder: Path, arrays: list[np.ndarray], container: str) -> str:
    """Write arrays without names."""
    file = folder / f"row.{container.partition(':')[0]}"
    if container == "npz":
        np.savez(file, *arrays)
        return str(file)
    numbered = {str(number): value for number, value in enumerate(arrays)}
    if container in ("h5", "safetensors"):
        return written(folder, numbered, container)
    shown = {
        "pkl": arrays,
        "pkl:tuple": tuple(arrays),
        "pkl:dict": {"weights": arrays},
        "pkl:pairs": {f"l{n}": arrays[n : n + 2] for n in range(0, len(arrays), 2)},
    }
    file.write_bytes(pickle.dumps(shown[container]))
    return str(file)


def transposed(value: np.ndarray) -> np.ndarray:
    """Return a kernel with its outputs first, a weight with its outputs last."""
    if value.ndim < 3:
        return value.T
    return np.transpose(value, (value.ndim - 1, value.ndim - 2, *range(value.ndim - 2)))


CONTAINERS = ("npz", "pkl:dict", "safetensors", "h5")


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("arrays", ROWS.values(), ids=list(ROWS))
def test_rows_of_arrays_are_layers_by_their_shapes(
    arrays: list[np.ndarray], container: str, tmp_path: Path
) -> None:
    source = row(tmp_path, arrays, container)
    done = convert(source, str(tmp_path / "out.pt"), to="torch", layout="none")
    assert done.written
    assert done.report.complete
    assert done.report.assumed
    tree = open_checkpoint(str(tmp_path / "out.pt")).tree
    values = {leaf.key: leaf.array() for _, leaf in tree.tensors()}
    matrices = [value for value in arrays if value.ndim > 1]
    for value in matrices:
        assert any(
            array.shape == transposed(value).shape and np.array_equal(array, transposed(value))
            for array in values.values()
        )
    if container != "h5":
        kept = convert(source, str(tmp_path / "out-1"), to="tf", layout="none")
        assert {move.rule for move in kept.report.mapped} == {"keep"}


def test_lists_of_a_layers_arrays_are_layers(tmp_path: Path) -> None:
    source = row(tmp_path, DENSE, "pkl:pairs")
    done = convert(source, str(tmp_path / "out.pt"), to="torch", layout="none")
    assert [move.rule for move in done.report.mapped] == ["transpose", "keep"] * 3
    assert [move.target for move in done.report.mapped][:2] == ["l0/weight", "l0/bias"]


@pytest.mark.parametrize("arrays", [[transposed(item) for item in DENSE], TORCH_LSTM], ids=["dense", "lstm"])
def test_rows_of_pytorchs_arrays_go_to_tensorflow(arrays: list[np.ndarray], tmp_path: Path) -> None:
    source = row(tmp_path, arrays, "pkl")
    done = convert(source, str(tmp_path / "out-1"), to="tf", layout="none")
    assert done.report.assumed
    assert "transpose" in {move.rule for move in done.report.mapped}
    kept = convert(source, str(tmp_path / "out.pt"), to="torch", layout="none")
    assert {move.rule for move in kept.report.mapped} == {"keep"}


SQUARE_ROW = [array(4, 4), array(4), array(4, 4), array(4)]
SYMMETRIC = [array(3, 5), array(5, 3)]
ONE_LAYER = [array(3, 5), array(5)]


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("arrays", [SQUARE_ROW, SYMMETRIC, ONE_LAYER], ids=["square", "symmetric", "one"])
def test_rows_with_two_readings_are_refused(arrays: list[np.ndarray], container: str, tmp_path: Path) -> None:
    source = row(tmp_path, arrays, container)
    with pytest.raises(MappingError) as caught:
        convert(source, str(tmp_path / "out.pt"), to="torch", layout="none")
    assert "--from tf" in str(caught.value.hint)
    with pytest.raises(MappingError):
        model_source(open_checkpoint(source), None)
    # The hint works.
    done = convert(source, str(tmp_path / "out.pt"), to="torch", layout="none", from_="tf")
    assert done.report.complete
    assert {move.rule for move in done.report.mapped} <= {"transpose", "keep"}
    assert done.report.mapped[0].rule == "transpose"


def test_rows_that_are_no_layers_in_a_row_are_refused(tmp_path: Path) -> None:
    # Layers that do not follow each other, and a vector before any.
    source = row(tmp_path, [array(3, 5), array(7, 4), array(4)], "pkl")
    with pytest.raises(MappingError):
        convert(source, str(tmp_path / "out.pt"), to="torch", layout="none")
    source = row(tmp_path, [array(5), array(3, 5), array(5)], "pkl")
    with pytest.raises(MappingError):
        convert(source, str(tmp_path / "out.pt"), to="torch", layout="none", from_="tf")


def test_rows_of_data_are_copied(tmp_path: Path) -> None:
    source = row(tmp_path, [array(9, 3), array(9, 2), array(9, 3)], "npz")
    for target, to in (("out.pt", "torch"), ("out-1", "tf")):
        done = convert(source, str(tmp_path / target), to=to, layout="none")
        assert {move.rule for move in done.report.mapped} == {"keep"}


@pytest.mark.torch
def test_a_row_fills_a_model(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from ckpttool import load_into

    net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 4), torch.nn.Linear(4, 4))
    arrays = [array(3, 5), array(5), array(5, 4), array(4), array(4, 4), array(4)]
    load_into(net, row(tmp_path, arrays, "pkl"))
    for layer, value in zip(net, arrays[::2], strict=True):
        np.testing.assert_array_equal(layer.weight.detach().numpy(), value.T)


@pytest.mark.parametrize("container", ANY)
@pytest.mark.parametrize(("arrays", "native"), [(TORCH, "torch"), (KERAS, "tf")], ids=["torch", "keras"])
def test_names_of_layers_and_tensors_in_one_word_are_not_copied_to_the_other_framework(
    arrays: Arrays, native: str, container: str, tmp_path: Path
) -> None:
    joined = {name.replace(".", "_").replace("/", "_"): value for name, value in arrays.items()}
    source = written(tmp_path, joined, container)
    targets = {"torch": "out.pt", "tf": "out-1"}
    kept = convert(source, str(tmp_path / targets[native]), to=native, layout="none")
    assert {move.rule for move in kept.report.mapped} == {"keep"}
    (other,) = targets.keys() - {native}
    if native == "tf":  # names of TensorFlow's layers in one word, as a program names its variables
        done = convert(source, str(tmp_path / targets[other]), to=other, layout="none")
        assert {move.rule for move in done.report.mapped} == {"keep", "transpose"}
        return
    with pytest.raises(MappingError):
        convert(source, str(tmp_path / targets[other]), to=other, layout="none")


# --- Layers that a program of TensorFlow 1 names by hand ----------------------------------------------------


def hand_written(path: Path, arrays: Arrays) -> str:
    """Write a checkpoint of TensorFlow 1 with these variables."""
    metas = [v1.meta(name.encode(), v1.shape(*a.shape), 1, [v1.FULL] * a.ndim) for name, a in arrays.items()]
    rows = [v1.entry(name.encode(), [v1.FULL] * a.ndim, v1.floats(a.tobytes())) for name, a in arrays.items()]
    path.write_bytes(v1.table(sorted([(b"", v1.header(*metas)), *rows])))
    return str(path)


FIRST, SECOND = (array(4, 10), array(10)), (array(10, 3), array(3))
NETWORK = (*FIRST, *SECOND)


def rows_of(*names: str) -> Arrays:
    """Return the network's variables with biases [1, n]."""
    return {name: a if a.ndim == 2 else a[None] for name, a in zip(names, NETWORK, strict=True)}


def vectors_of(*names: str) -> Arrays:
    return dict(zip(names, NETWORK, strict=True))


BY_HAND: dict[str, Arrays] = {
    "numbers after": rows_of("w_1", "b_1", "w_2", "b_2"),
    "numbers in words": vectors_of("W1", "b1", "W2", "b2"),
    "words": vectors_of("layer1_w", "layer1_bias", "layer2_w", "layer2_bias"),
    "words before": vectors_of("weights_hidden", "biases_hidden", "weights_out", "biases_out"),
    "no names": vectors_of("Variable", "Variable_1", "Variable_2", "Variable_3"),
    "no names, rows": rows_of("Variable", "Variable_1", "Variable_2", "Variable_3"),
    "scopes": rows_of("eval_net/l1/w1", "eval_net/l1/b1", "eval_net/l2/w2", "eval_net/l2/b2"),
    "known names, rows": rows_of("l1/kernel", "l1/bias", "l2/kernel", "l2/bias"),
    "repeated": vectors_of("w", "b", "w_1", "b_1"),
    "numbers before": vectors_of("theta_p/1w", "theta_p/1b", "theta_p/2w", "theta_p/2b"),
}


@pytest.mark.torch
@pytest.mark.parametrize("name", BY_HAND)
def test_networks_named_by_hand_compute_the_same(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    source = hand_written(tmp_path / "model.ckpt", BY_HAND[name])
    done = convert(source, str(tmp_path / "net.pt"))
    assert done.written, done.report
    state = torch.load(tmp_path / "net.pt", weights_only=True)
    layers = [torch.nn.Linear(4, 10), torch.nn.Linear(10, 3)]
    for n, layer in enumerate(layers):
        tensors = [*state.values()][2 * n : 2 * n + 2]
        layer.load_state_dict({("weight", "bias")[2 - t.ndim]: t for t in tensors})
    x = array(5, 4)
    hidden = np.maximum(x @ FIRST[0] + FIRST[1], 0)
    with torch.no_grad():
        outputs = layers[1](layers[0](torch.from_numpy(x)).relu()).numpy()
    np.testing.assert_allclose(outputs, hidden @ SECOND[0] + SECOND[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BY_HAND)
def test_networks_named_by_hand_come_back(name: str, tmp_path: Path) -> None:
    arrays = BY_HAND[name]
    save(open_checkpoint(hand_written(tmp_path / "v1.ckpt", arrays)).tree, str(tmp_path / "model"), "tf1")
    assert convert(str(tmp_path / "model"), str(tmp_path / "net.pt")).written
    assert convert(str(tmp_path / "net.pt"), str(tmp_path / "back"), to="tf1").written
    stored = {leaf.key: leaf.array() for _, leaf in open_checkpoint(str(tmp_path / "back")).tree.tensors()}
    assert stored.keys() == arrays.keys()
    assert all(np.array_equal(stored[name], a) for name, a in arrays.items())


@pytest.mark.parametrize("name", ["numbers after", "no names", "no names, rows"])
def test_moments_of_a_bias_have_its_shape(name: str, tmp_path: Path) -> None:
    arrays = BY_HAND[name]
    moments = {f"{n}/{s}": np.full_like(a, 2.0) for n, a in arrays.items() for s in ("Adam", "Adam_1")}
    moments |= {"beta1_power": np.float32(0.9), "beta2_power": np.float32(0.999)}
    done = convert(
        hand_written(tmp_path / "m.ckpt", arrays | moments), str(tmp_path / "net.pt"), dry_run=True
    )
    assert not done.report.unused
    for moment in ("exp_avg", "exp_avg_sq"):
        shapes = [move.shape_out for move in done.report.mapped if move.target.endswith(f"/{moment}")]
        assert shapes == [(10, 4), (10,), (3, 10), (3,)]


@pytest.mark.parametrize("bias", [(1, 4), (3,)])
def test_a_bias_of_another_length_is_no_bias(bias: tuple[int, ...], tmp_path: Path) -> None:
    source = hand_written(tmp_path / "m.ckpt", {"w_1": array(4, 10), "b_1": array(*bias)})
    with pytest.raises(MappingError):
        convert(source, str(tmp_path / "net.pt"), allow_missing=True)
    assert not (tmp_path / "net.pt").exists()


def test_a_plan_without_the_largest_matrix_is_refused(tmp_path: Path) -> None:
    arrays = {"big_one": array(40, 10), "l2/kernel": array(10, 3), "l2/bias": array(3)}
    source = hand_written(tmp_path / "m.ckpt", arrays)
    receipt = convert(source, str(tmp_path / "net.pt"))
    assert not receipt.written
    assert not any("--allow-missing" in note for note in receipt.report.notes)
    with pytest.raises(MappingError):
        convert(source, str(tmp_path / "net.pt"), allow_missing=True)
    small = hand_written(tmp_path / "s.ckpt", {**arrays, "big_one": array(2, 10)})
    assert convert(small, str(tmp_path / "net.pt"), allow_missing=True).written


def test_unnamed_networks_of_one_graph_are_numbered(tmp_path: Path) -> None:
    actor = [array(3, 8), array(8), array(8, 6), array(6), array(6, 1), array(1)]
    # The action joins the second layer by a matrix: no output before it has its size.
    critic = [array(3, 8), array(8), array(2, 6), array(6), array(8, 6), array(6), array(6, 1), array(1)]
    every = [*actor, *actor, *critic, *critic]
    names = ["Variable", *(f"Variable_{n}" for n in range(1, len(every)))]
    source = hand_written(tmp_path / "m.ckpt", dict(zip(names, every, strict=True)))
    done = convert(source, str(tmp_path / "net.pt"))
    assert done.written
    assert any("4 networks" in sentence for sentence in done.report.assumed)
    moves = {move.target: move for move in done.report.mapped}
    for network, arrays in enumerate((actor, actor, critic, critic)):
        for layer, matrix in enumerate(arrays[::2]):
            assert moves[f"{network}/{layer}/weight"].shape_out == matrix.T.shape


def test_an_adam_whose_powers_are_zero_is_left_out_by_name(tmp_path: Path) -> None:
    arrays = BY_HAND["no names"]
    moments = {f"{n}/{s}": np.full_like(a, 2.0) for n, a in arrays.items() for s in ("Adam", "Adam_1")}
    powers = {name: np.float32(0).reshape(()) for name in ("beta1_power", "beta2_power")}
    source = hand_written(tmp_path / "m.ckpt", {**arrays, **moments, **powers})
    done = convert(source, str(tmp_path / "net.pt"))
    assert done.written
    assert any("left out" in note for note in done.report.notes), done.report.notes
    assert not any("optimizer" in move.target for move in done.report.mapped)


@pytest.mark.parametrize(
    ("layer", "kernel", "assumed"),
    [
        ("dense_1", "dense_1/kernel:0", False),
        ("dense_1", "agent/dense_1/kernel:0", False),
        ("dense_1", "dense_1_W", False),
        ("mine", "mine/kernel:0", True),
        ("dense_1", "dense_1/weights:0", True),
    ],
)
def test_keras_own_files_fix_the_axes_of_its_own_layers(
    tmp_path: Path, layer: str, kernel: str, *, assumed: bool
) -> None:
    import h5py

    weight = array(4, 4)
    with h5py.File(tmp_path / "m.h5", "w") as file:
        file.attrs["layer_names"] = [layer.encode()]
        file.attrs["keras_version"] = b"2.2.4"
        file.create_group(layer).attrs["weight_names"] = [kernel.encode()]
        file[layer][kernel] = weight
    done = convert(str(tmp_path / "m.h5"), str(tmp_path / "m.pt"))
    tree = open_checkpoint(done.target).tree
    (written,) = (leaf.array() for _, leaf in tree.tensors())
    np.testing.assert_array_equal(written, weight.T)
    assert any("square" in sentence for sentence in done.report.assumed) is assumed


def test_a_list_of_named_variables_is_read_as_layers_by_the_names():
    names = ("k/kernel", "k/kernel", "k/gamma", "k/beta", "k/latent", "k/kernel", "k/bias", "k/bias")
    shapes = ((3, 4), (4, 4), (4,), (4,), (2, 4), (4, 2), (2,), (2,))
    leaves = {
        (attr("variables"), index(n)): Leaf("float32", shape, Inline(array(*shape).tobytes()), "", name=name)
        for n, (name, shape) in enumerate(zip(names, shapes, strict=True))
    }
    grouped = orientation.group_unnamed_arrays(Tree(leaves), "tensorflow")
    assert [display(path) for path in grouped.tree] == [
        *("variables/0/kernel", "variables/1/kernel", "variables/2/gamma", "variables/2/beta"),
        # A second bias is of no layer before it.
        *("variables/3/latent", "variables/4/kernel", "variables/4/bias", "variables/5/bias"),
    ]
    assert len(grouped.assumed) == 1
    for path, old in grouped.sources.items():
        assert grouped.tree[path].source is leaves[old].source


def test_members_of_a_list_are_in_its_order_below_their_names_too():
    members = {
        ("kernel", "0"): (3, 4),
        ("bias", "1"): (4,),
        ("kernel", "2"): (4, 12),
        ("recurrent_kernel",): (4, 12),
        ("bias", "4"): (2, 12),
        ("kernel", "5"): (4, 2),
    }
    leaves = {
        tuple(index(int(step)) if step.isdigit() else attr(step) for step in ("k", *steps)): Leaf(
            "float32", shape, Inline(array(*shape).tobytes()), "", name=f"k/{steps[0]}"
        )
        for steps, shape in members.items()
    }
    grouped = orientation.group_unnamed_arrays(Tree(leaves), "tensorflow").tree
    kinds = [[kind.name for kind in layer.kinds] for layer in find_layers(grouped, "tensorflow")]
    assert [kind for kind in kinds if kind] == [["dense"], ["gru"], ["dense"]]


def test_the_projections_of_an_attention_in_a_list_are_one_layer():
    shapes = [shape for _ in range(3) for shape in ((6, 2, 3), (2, 3))] + [(2, 3, 6), (6,)]
    leaves = {
        (attr("variables"), index(n)): Leaf(
            "float32", shape, Inline(array(*shape).tobytes()), "", name=("k/kernel", "k/bias")[n % 2]
        )
        for n, shape in enumerate(shapes)
    }
    grouped = orientation.group_unnamed_arrays(Tree(leaves), "tensorflow")
    (layer,) = find_layers(grouped.tree, "tensorflow")
    assert [kind.name for kind in layer.kinds] == ["attention"]
    # Biases of one axis are those of convolutions.
    for path in [path for path, leaf in leaves.items() if leaf.shape == (2, 3)]:
        leaves[path] = replace(leaves[path], shape=(3,), source=Inline(array(3).tobytes()))
    kinds = {
        k.name
        for one in find_layers(
            orientation.group_unnamed_arrays(Tree(leaves), "tensorflow").tree, "tensorflow"
        )
        for k in one.kinds
    }
    assert "attention" not in kinds


def test_arrays_of_objects_that_are_no_layers_stay_as_they_are():
    leaves = {
        (attr("d"), attr("vars"), index(n)): Leaf(
            "float32", shape, Inline(array(*shape).tobytes()), f"d/vars/{n}"
        )
        for n, shape in enumerate(((4, 8, 12), (4, 1, 12)))
    }
    tree = Tree(leaves)
    assert orientation.group_unnamed_arrays(tree, "tensorflow").tree is tree
