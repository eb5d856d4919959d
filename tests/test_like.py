"""`convert --like`: the user's own models are filled, and compute what the source's model computes."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from ckpttool.commands.convert import ConversionResult
from ckpttool.commands.convert import fill as fill_model
from ckpttool.conversion import filling
from ckpttool.core import CkpttoolError, Inline, MappingError, Tree, UsageError, sidecar, sidecar_parsing
from ckpttool.formats import open_checkpoint
from ckpttool.libraries.optimizer_states import ConvertedOptimizers
from ckpttool.mapping.solver import FillResult
from ckpttool.networks import ModelSpec, model_child, model_runner, worker
from ckpttool.verification import two_models
from tests import tensorflow_child
from tests.conftest import ROOT, refused
from tests.conftest import in_process as run
from tests.golden_texts import Golden
from tests.shared_runners import InThisProcess

HERE = ROOT / "tests"
WITHIN = 1e-5

# Input shapes without the batch; whole numbers up to the one given for models of words.
GIVEN: dict[str, tuple[tuple[int, ...], int]] = {
    "conv_net": ((8, 10, 3), 0),
    "old_conv_net": ((8, 10, 3), 0),
    "stacked_lstm": ((7, 5), 0),
    "old_stacked_lstm": ((7, 5), 0),
    "grus": ((7, 5), 0),
    "transformer": ((9,), 20),
    "Subclassed": ((12,), 0),
    "u_net": ((32, 32, 3), 0),
    "square": ((256,), 0),
    "TwinCritic": ((24,), 0),
    "Tied": ((6,), 11),
    "kinds": ((12, 12, 4), 0),
    "Module": ((5,), 0),
}


def fill(
    source: str, target: str, /, to: str, factory: str, shapes: Any = (), arguments: Any = None, **how: Any
) -> ConversionResult:
    """Fill a model of a file beside this one, in this process."""
    before = worker.ModelProcess
    filling.ModelProcess = InThisProcess  # type: ignore[misc]
    path, folder = list(sys.path), os.getcwd()
    os.chdir(HERE)
    try:
        return fill_model(source, target, ModelSpec(factory, arguments, tuple(shapes)), to=to, **how)
    finally:
        filling.ModelProcess = before  # type: ignore[misc]
        sys.path[:] = path
        os.chdir(folder)


def inputs(name: str, shape: tuple[int, ...], words: int) -> np.ndarray:
    generator = np.random.default_rng(len(name))
    if words:
        return generator.integers(0, words, (3, *shape)).astype(np.int32)
    return generator.standard_normal((3, *shape)).astype(np.float32)


SIX = np.random.default_rng(6).standard_normal((3, 6)).astype(np.float32)


# In a process with TensorFlow.


def saved_by_keras(folder: Path) -> dict[str, Any]:
    """Save every model with random weights in its form; return the files."""
    sys.path.insert(0, str(HERE))
    import like_keras
    import tensorflow as tf

    files = {}
    for name, (shape, words) in GIVEN.items():
        if name.startswith("old_") and like_keras.tf_keras is None:
            continue
        model = getattr(like_keras, name)()
        batch = inputs(name, shape, words)
        model(batch)
        scramble(model)
        file = folder / name
        if like_keras.FORMS[name] == "keras":
            model.save_weights(f"{file}.weights.h5")
            files[name] = f"{file}.weights.h5"
        else:
            files[name] = tf.train.Checkpoint(model).save(str(file))
        np.save(f"{file}.npy", np.asarray(model(batch)))
    gated = like_keras.gated()
    scramble(gated)
    gated.save(folder / "gated.keras")
    np.save(folder / "gated.npy", np.asarray(gated(SIX)))
    files["exact"] = {name: list(exact_outputs(name)) for name in EXACT}
    files["zeros"] = list(drawn_weights())
    return files


EXACT = ("stacked_lstm", "transformer", "kinds")


def exact_outputs(name: str) -> Iterator[list[Any]]:
    """Yield the type and a sum of the outputs in float64: of the model itself, of a copy, and in float32."""
    import like_keras

    model = getattr(like_keras, name)()
    scramble(model)
    runner, batch = model_child.wrap_model(model), inputs(name, *GIVEN[name])
    for exact, copied in ((True, False), (True, True), (False, False)):
        runner.make_exact(["x"], [batch], copied=copied)
        ((_, array),) = runner.outputs(runner.call(["x"], [batch], exact=exact))
        yield [array.dtype.name, float(array.astype(np.float64).sum())]


def drawn_weights() -> Iterator[float]:
    """Yield sums of weights drawn while initializers give zeros, and afterwards."""
    import keras

    chosen = ("glorot_uniform", "he_normal", "orthogonal", "random_normal", "truncated_normal")
    with model_child.zero_initializers(keras):
        drawn = [np.asarray(keras.initializers.get(name)((3, 3))) for name in chosen]
        yield float(
            np.abs(drawn).sum() + np.abs(np.asarray(keras.initializers.get("ones")((3, 3))) - 1).sum()
        )
    for name in chosen:
        yield float(np.abs(np.asarray(keras.initializers.get(name)((3, 3)))).sum())


def scramble(model: Any) -> None:
    generator = np.random.default_rng(7)
    for variable in getattr(model, "weights", None) or model.variables:
        if "seed" in variable.name:
            continue
        value = generator.standard_normal(tuple(variable.shape)).astype(np.float32)
        scale = 1 / np.sqrt(max(1, np.prod(value.shape[:-1]))) if value.ndim > 1 else 0.3
        variable.assign(np.abs(value) + 0.5 if "variance" in variable.name else scale * value)


def filled_in_keras(folder: Path) -> dict[str, Any]:
    """Fill every Keras model from its twin's file; return how far its outputs are from the twin's."""
    sys.path.insert(0, str(HERE))
    import like_keras

    errors = {}
    for name, (shape, words) in GIVEN.items():
        if name.startswith("old_") and like_keras.tf_keras is None:
            continue
        form = like_keras.FORMS[name]
        target = str(folder / f"back_{name}") + (".weights.h5" if form == "keras" else "-1")
        try:
            factory, unnamed = f"like_keras:{name}", name == "u_net"
            done = fill(str(folder / f"{name}.pt"), target, form, factory, [shape], accept_order=unnamed)
        except CkpttoolError as error:
            errors[name] = {"error": str(error)}
            continue
        if done.digest is None:
            errors[name] = {"error": f"{done.report.unused} {done.report.missing} {done.report.notes}"}
            continue
        # It has restored the file and asserted that all of it was consumed.
        model, batch = InThisProcess.last.session.runner.model, inputs(name, shape, words)
        there = np.load(folder / f"torch_{name}.npy")
        errors[name] = {"error": None, "far": float(np.abs(np.asarray(model(batch)) - there).max())}
    target = str(folder / "back_gated.weights.h5")
    done = fill(str(folder / "traced_gated.pt"), target, "keras", "like_keras:gated")
    if done.digest is not None:
        outputs = np.asarray(InThisProcess.last.session.runner.model(SIX))
        far = float(np.abs(outputs - np.load(folder / "torch_gated.npy")).max())
        errors["gated"] = {"by": [match.by for match in done.matched], "far": far}
    for name in UNLOADED:
        path = target if like_keras.FORMS[name] == "keras" else str(folder / "unloaded-1")
        file, shapes = str(folder / f"{name}.pt"), [GIVEN[name][0]]
        errors[f"{name} unloaded"] = unloaded(
            lambda: fill(file, path, like_keras.FORMS[name], f"like_keras:{name}", shapes, force=True)  # noqa: B023
        )
    return errors


# Keras stores them as `.weights.h5` and as objects of TensorFlow.
UNLOADED = ("square", "Module")


def unloaded(write: Callable[[], Any]) -> dict[str, Any]:
    """Return the path in the error of a model that keeps its values, and how often it was saved."""
    handlers, saves = dict(model_runner.HANDLERS), []
    save = handlers["save"]
    try:
        model_runner.HANDLERS.update(
            load=lambda *_, **__: {},
            save=lambda *args, **values: (saves.append(1), save(*args, **values))[1],  # type: ignore[func-returns-value]
        )
        write()
    except MappingError as error:
        return {"path": error.path, "saves": len(saves)}
    finally:
        model_runner.HANDLERS.update(handlers)
    return {"path": None, "saves": len(saves)}


# In this process, where PyTorch is.


@pytest.fixture(scope="module")
def keras_truth(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """What Keras says of both directions, and the folder of what it saved itself."""
    tensorflow_child.require("tensorflow")
    pytest.importorskip("torch")
    folder, back = tmp_path_factory.mktemp("like"), tmp_path_factory.mktemp("back")
    save_twins(back)
    return folder, tensorflow_child.run_each(__file__, {"saved_by_keras": folder, "filled_in_keras": back})


@pytest.mark.torch
@pytest.mark.tensorflow
@pytest.mark.parametrize("name", EXACT)
def test_keras_computes_in_float64_without_a_copy(
    name: str, keras_truth: tuple[Path, dict[str, Any]]
) -> None:
    own, copied, plain = keras_truth[1]["saved_by_keras"]["exact"][name]
    assert own == copied
    assert (own[0], plain[0]) == ("float64", "float32")
    assert own[1] == pytest.approx(plain[1], rel=1e-4)
    assert own[1] != plain[1]


@pytest.mark.torch
@pytest.mark.tensorflow
def test_initializers_draw_nothing_for_values_of_a_file(keras_truth: tuple[Path, dict[str, Any]]) -> None:
    zeros, *drawn = keras_truth[1]["saved_by_keras"]["zeros"]
    assert zeros == 0
    assert all(drawn)


@pytest.mark.torch
@pytest.mark.tensorflow
@pytest.mark.parametrize("name", GIVEN)
def test_a_twin_computes_what_keras_computes(name: str, keras_truth: tuple[Path, dict[str, Any]]) -> None:
    torch = pytest.importorskip("torch")
    folder, files = keras_truth[0], keras_truth[1]["saved_by_keras"]
    if name not in files:
        pytest.skip("needs tf_keras")
    sys.path.insert(0, str(HERE))
    import like_torch

    twin = like_torch.TWINS[name]
    target = folder / f"to_{name}.pt"
    shapes = like_torch.SHAPES.get(name, ())
    if name == "u_net":  # words of one side only: without a call nothing orders the layers
        assert fill(files[name], str(target), "torch", f"like_torch:{twin.__name__}").digest is None
    done = fill(files[name], str(target), "torch", f"like_torch:{twin.__name__}", shapes)
    assert done.digest, (done.report.unused, done.report.missing, done.report.notes)
    assert done.loaded
    model = twin()
    model.load_state_dict(torch.load(target), strict=True)
    batch = torch.tensor(inputs(name, *GIVEN[name]))
    outputs = model.eval()(batch).detach().numpy()
    np.testing.assert_allclose(outputs, np.load(folder / f"{name}.npy"), atol=WITHIN, rtol=WITHIN)


def save_twins(folder: Path) -> None:
    """Save every twin with random weights, and its outputs, for the Keras models to be filled from."""
    import torch

    sys.path.insert(0, str(HERE))
    import like_torch

    torch.manual_seed(3)
    for name, twin in like_torch.TWINS.items():
        model = twin().eval()
        with torch.no_grad():
            for key, value in model.state_dict().items():
                if "running_var" in key:
                    value.uniform_(0.5, 2)
                elif value.is_floating_point() and value.ndim == 1:
                    value.normal_(0, 0.3)
            batch = torch.tensor(inputs(name, *GIVEN[name]))
            np.save(folder / f"torch_{name}.npy", model(batch).numpy())
        torch.save(model.state_dict(), folder / f"{name}.pt")
    import like_small

    gated = like_small.Gated(("n_u", "q", "p", "n_v"))
    traced(gated, folder / "traced_gated.pt")
    np.save(folder / "torch_gated.npy", gated(torch.tensor(SIX)).detach().numpy())


@pytest.mark.torch
@pytest.mark.tensorflow
@pytest.mark.parametrize("name", GIVEN)
def test_keras_computes_what_its_twin_computes(name: str, keras_truth: tuple[Path, dict[str, Any]]) -> None:
    back = keras_truth[1]["filled_in_keras"]
    if name not in back:
        pytest.skip("needs tf_keras")
    assert back[name]["error"] is None
    assert back[name]["far"] < WITHIN


# What only the outputs of both models decide.


def traced(model: Any, file: Path) -> str:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.trace(model.eval(), torch.ones(2, 6)).save(file)
    return str(file)


def gated(names: tuple[str, ...] = ("n_u", "q", "p", "n_v"), **settings: bool) -> Any:
    sys.path.insert(0, str(HERE))
    import like_small

    return like_small.Gated(names, **settings)


# The order of creation and the names say the opposite of what the calls do.
GATED: Any = {"names": ("n_j", "r", "s", "n_i")}


@pytest.mark.torch
def test_outputs_decide_which_layer_of_the_same_shape_is_which(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    source, target = gated(), tmp_path / "out.pt"
    file = traced(source, tmp_path / "gated.pt")
    done = fill(file, str(target), "torch", "like_small:Gated", [(6,)], arguments=GATED, verify=False)
    assert done.digest, (done.ambiguous, done.report.notes)
    model, x = gated(**GATED), torch.tensor(SIX)
    model.load_state_dict(torch.load(target))
    assert torch.equal(model(x), source(x))
    by = {(match.source, match.target): match.by for match in done.matched}
    assert by.keys() == {("n_u", "n_j"), ("q", "r"), ("p", "s"), ("n_v", "n_i")}
    assert "outputs" in by.values()
    rules = sidecar_parsing.read_sidecar(sidecar.sidecar_path(str(target))).rules
    assert "outputs" in {line["by"] for line in rules}


@pytest.mark.torch
@pytest.mark.parametrize(
    "settings", [{"alike": True}, {"halves": True}], ids=["both choices compute it", "no choice does"]
)
def test_what_outputs_do_not_decide_stays_refused(settings: dict[str, bool], tmp_path: Path) -> None:
    file = traced(gated(alike="alike" in settings), tmp_path / "gated.pt")
    arguments, target = {**GATED, **settings}, tmp_path / "out.pt"
    done = fill(file, str(target), "torch", "like_small:Gated", [(6,)], arguments=arguments, verify=False)
    assert done.digest is None
    assert {group.targets for group in done.ambiguous} >= {("r", "s")}
    assert not target.exists()


@pytest.mark.torch
@pytest.mark.parametrize("part", [None, "net"])
def test_the_code_of_the_source_decides_where_the_file_records_no_computation(
    part: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(two_models, "ModelProcess", InThisProcess)
    source, file, target = gated(), str(tmp_path / "gated.pt"), tmp_path / "out.pt"
    torch.save(source.state_dict() if part is None else {part: source.state_dict()}, file)
    how: dict[str, Any] = {"arguments": GATED, "verify": False, "part": part}
    assert fill(file, str(target), "torch", "like_small:Gated", [(6,)], **how).digest is None
    code = ModelSpec("like_small:Gated", {"names": source.names})
    done = fill(file, str(target), "torch", "like_small:Gated", [(6,)], **how, like_source=code)
    assert done.digest, (done.ambiguous, done.report.notes)
    model, x = gated(**GATED), torch.tensor(SIX)
    model.load_state_dict(torch.load(target))
    assert torch.equal(model(x), source(x))


@pytest.mark.torch
@pytest.mark.tensorflow
def test_outputs_decide_from_keras_to_torch(keras_truth: tuple[Path, dict[str, Any]]) -> None:
    torch = pytest.importorskip("torch")
    folder, target = keras_truth[0], keras_truth[0] / "to_gated.pt"
    file = str(folder / "gated.keras")
    arguments = {"names": ("n_u", "q", "p", "n_v")}
    done = fill(file, str(target), "torch", "like_small:Gated", [(6,)], arguments=arguments, verify=False)
    assert done.digest, (done.ambiguous, done.report.notes)
    assert "outputs" in {match.by for match in done.matched}
    model = gated()
    model.load_state_dict(torch.load(target))
    outputs = model(torch.tensor(SIX)).detach().numpy()
    np.testing.assert_allclose(outputs, np.load(folder / "gated.npy"), atol=WITHIN, rtol=WITHIN)


@pytest.mark.torch
@pytest.mark.tensorflow
def test_outputs_decide_from_torch_to_keras(keras_truth: tuple[Path, dict[str, Any]]) -> None:
    outcome = keras_truth[1]["filled_in_keras"]["gated"]
    assert "outputs" in outcome["by"]
    assert outcome["far"] < WITHIN


@pytest.mark.torch
@pytest.mark.tensorflow
@pytest.mark.parametrize("name", UNLOADED)
def test_values_that_keras_does_not_load_are_noticed(
    name: str, keras_truth: tuple[Path, dict[str, Any]]
) -> None:
    outcome = keras_truth[1]["filled_in_keras"][f"{name} unloaded"]
    assert outcome["path"]
    assert outcome["saves"] == 1  # the numbers of its weights, beside its outline


# What is open, and what is wrong.


def arrays(tmp_path: Path, **named: np.ndarray) -> str:
    """Return an npz file of arrays whose names have / for __."""
    np.savez(tmp_path / "source.npz", **{name.replace("__", "/"): array for name, array in named.items()})
    return str(tmp_path / "source.npz")


def dense(tmp_path: Path, *names: str, inputs: int = 4, outputs: int = 4) -> str:
    generator = np.random.default_rng(1)
    contents = {}
    for name in names:
        contents[f"{name}__kernel"] = generator.standard_normal((inputs, outputs)).astype(np.float32)
        contents[f"{name}__bias"] = generator.standard_normal(outputs).astype(np.float32)
    return arrays(tmp_path, **contents)


def loaded(file: Path) -> dict[str, np.ndarray]:
    torch = pytest.importorskip("torch")
    return {key: value.numpy() for key, value in torch.load(file).items()}


@pytest.mark.torch
def test_what_no_name_and_no_order_decides_is_asked_for(tmp_path: Path) -> None:
    source, target = dense(tmp_path, "body", "head"), tmp_path / "out.pt"
    # An npz lists its arrays by name: their order says nothing.
    error = fill(source, str(target), "torch", "like_small:Pair")
    (group,) = error.ambiguous
    assert (group.sources, group.targets) == (("body", "head"), ("left", "right"))
    assert not error.report.complete
    assert not target.exists()
    error = fill(source, str(target), "torch", "like_small:Pair", match=("head=left", "body=right"))
    assert [(m.source, m.target, m.by) for m in error.matched] == [
        ("head", "left", "given"),
        ("body", "right", "given"),
    ]
    kernel = np.load(source)["head/kernel"]
    assert (loaded(target)["left.weight"] == kernel.T).all()


def counted(tmp_path: Path) -> str:
    """Return a `.weights.h5` as Keras 3 writes one of a model with self.q1 and self.q2, two Sequentials."""
    file, number = tmp_path / "critics.weights.h5", 0
    with h5py.File(file, "w") as archive:
        archive.create_group("vars").attrs["name"] = "critics"
        for network in ("sequential", "sequential_1"):
            archive.create_group(f"layers/{network}/vars").attrs["name"] = network
            for layer, outputs in (("dense", 4), ("dense_1", 1)):
                group = archive.create_group(f"layers/{network}/layers/{layer}/vars")
                group.attrs["name"] = f"dense_{number}" if number else "dense"
                number += 1
                group["0"] = np.full((4, outputs), number, np.float32)
                group["1"] = np.full(outputs, number, np.float32)
    return str(file)


@pytest.mark.torch
def test_networks_that_a_file_only_counts_are_paired_by_an_accepted_order(tmp_path: Path) -> None:
    target = tmp_path / "out.pt"
    refused = fill(counted(tmp_path), str(target), "torch", "like_small:Critics")
    assert refused.digest is None
    assert not any(group.ordered for group in refused.ambiguous)
    error = fill(counted(tmp_path), str(target), "torch", "like_small:Critics", accept_order=True)
    assert {match.by for match in error.matched} == {"order"}
    assert {line["by"] for line in sidecar_parsing.read_sidecar(sidecar.sidecar_path(str(target))).rules} == {
        "order"
    }
    assert any(line.startswith("order: ") for line in error.report.assumed)
    assert any(
        line.startswith("order: ")
        for line in sidecar_parsing.read_sidecar(sidecar.sidecar_path(str(target))).assumed
    )
    biases = {name: array[0] for name, array in loaded(target).items() if name.endswith("bias")}
    assert biases == {"q1.0.bias": 1, "q1.2.bias": 2, "q2.0.bias": 3, "q2.2.bias": 4}


@pytest.mark.torch
def test_networks_that_a_file_only_counts_are_asked_for_where_numbers_say_another_order(
    tmp_path: Path,
) -> None:
    source, target = counted(tmp_path), tmp_path / "out.pt"
    error = fill(source, str(target), "torch", "like_small:CriticsTurned")
    assert not error.matched
    assert not error.report.complete
    assert not target.exists()
    fill(source, str(target), "torch", "like_small:CriticsTurned", match=("sequential=q1",))
    assert fill(source, f"{target}.2.pt", "torch", "like_small:CriticsTurned", accept_order=True).digest
    assert [loaded(target)[f"q{n}.0.bias"][0] for n in (1, 2)] == [1, 3]


@pytest.mark.torch
def test_what_stays_open_keeps_its_initial_values_if_that_is_allowed(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    target = tmp_path / "out.pt"
    torch.manual_seed(5)
    error = fill(dense(tmp_path, "left"), str(target), "torch", "like_small:Pair", allow_missing=True)
    assert error.report.missing == ("right/weight", "right/bias")
    torch.manual_seed(5)
    sys.path.insert(0, str(HERE))
    import like_small

    initial = like_small.Pair().right.weight.detach().numpy()
    assert (loaded(target)["right.weight"] == initial).all()


@pytest.mark.torch
@pytest.mark.parametrize("way", ["put", "load"])
def test_initial_values_are_those_before_anything_is_put_into_the_model(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(filling, "ModelProcess", InThisProcess)
    monkeypatch.chdir(HERE)
    with filling.TargetModel(ModelSpec("like_small:Pair"), "torch") as model:
        skeleton = model.skeleton(())
        kept = {path: leaf for path, leaf in skeleton.tree.tensors() if "right" in leaf.key}
        pair = InThisProcess.last.session.runner.model
        initial = pair.right.weight.detach().numpy().copy()
        if way == "put":
            zeros = {path: replace(leaf, source=Inline(bytes(leaf.nbytes))) for path, leaf in kept.items()}
            nothing = FillResult(Tree(zeros), (), (), (), (), (), (), ())
            model.assign(nothing, skeleton)
            assert not pair.right.weight.any()
            assert (next(leaf for leaf in kept.values() if "weight" in leaf.key).array() == initial).all()
        else:
            file = tmp_path / "zeros.pt"
            torch.save({key: 0 * value for key, value in pair.state_dict().items()}, file)
            model.prove(open_checkpoint(str(file)), ConvertedOptimizers(Tree({})))
            with pytest.raises(MappingError):
                next(iter(kept.values())).read()


@pytest.mark.torch
def test_one_name_and_two_shapes_is_told_with_both(tmp_path: Path, golden: Golden) -> None:
    with pytest.raises(MappingError) as caught:
        fill(dense(tmp_path, "fc", outputs=5), str(tmp_path / "out.pt"), "torch", "like_small:Named")
    golden(caught.value)
    assert "[4, 5]" in str(caught.value)
    assert "[4, 4]" in str(caught.value)


@pytest.mark.torch
def test_shapes_that_fit_nothing_are_told_with_both(tmp_path: Path, golden: Golden) -> None:
    source = dense(tmp_path, "q", outputs=5)
    error = fill(source, str(tmp_path / "out.pt"), "torch", "like_small:Named")
    golden("\n".join(error.report.notes))


@pytest.mark.torch
def test_wider_numbers_are_refused_unless_they_may_be_rounded(tmp_path: Path, golden: Golden) -> None:
    generator = np.random.default_rng(2)
    kernel = generator.standard_normal((4, 4))
    source, target = arrays(tmp_path, fc__kernel=kernel, fc__bias=np.zeros(4)), tmp_path / "out.pt"
    with pytest.raises(MappingError) as caught:
        fill(source, str(target), "torch", "like_small:Named")
    assert "--cast" in str(caught.value.hint)
    assert fill(source, str(target), "torch", "like_small:Named", cast=True).digest
    assert (loaded(target)["fc.weight"] == kernel.T.astype(np.float32)).all()
    rules = {line["rule"] for line in sidecar_parsing.read_sidecar(sidecar.sidecar_path(str(target))).rules}
    golden("\n".join(sorted(rules)))


@pytest.mark.torch
def test_narrower_numbers_are_held_exactly(tmp_path: Path, golden: Golden) -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.bfloat16, torch.float16):
        weight = torch.randn(4, 4).to(dtype)
        weight[0, 0] = float("nan")
        torch.save({"fc.weight": weight, "fc.bias": torch.ones(4, dtype=dtype)}, tmp_path / "half.pt")
        target = tmp_path / f"out_{dtype}.pt"
        done = fill(str(tmp_path / "half.pt"), str(target), "torch", "like_small:Named")
        filled_weight = torch.load(target)["fc.weight"]
        assert filled_weight.dtype == torch.float32
        assert torch.equal(filled_weight.nan_to_num(), weight.float().nan_to_num())
        golden("\n".join(sorted({move.rule for move in done.report.mapped})))


@pytest.mark.torch
def test_a_flattened_image_is_asked_for_and_seen_in_a_call(tmp_path: Path) -> None:
    kernel = np.arange(12 * 4, dtype=np.float32).reshape(12, 4)
    source = arrays(
        tmp_path,
        conv__kernel=np.zeros((3, 3, 1, 2), np.float32),
        conv__bias=np.zeros(2, np.float32),
        fc__kernel=kernel,
        fc__bias=np.zeros(4, np.float32),
    )
    target = tmp_path / "out.pt"
    error = fill(source, str(target), "torch", "like_small:Image")
    assert any("--flatten" in note for note in error.report.notes)
    assert not target.exists()
    fill(source, str(target), "torch", "like_small:Image", [(1, 4, 5)])
    expected = kernel.reshape(2, 3, 2, 4).transpose(3, 2, 0, 1).reshape(4, 12)
    assert (loaded(target)["fc.weight"] == expected).all()
    fill(
        source,
        str(tmp_path / "said.pt"),
        "torch",
        "like_small:Image",
        flatten=("fc=2,3,2",),
    )
    assert (loaded(tmp_path / "said.pt")["fc.weight"] == expected).all()


@pytest.mark.torch
def test_a_lazy_module_gets_its_shape_from_the_source(tmp_path: Path) -> None:
    error = fill(dense(tmp_path, "fc", inputs=7), str(tmp_path / "out.pt"), "torch", "like_small:Lazy")
    assert error.loaded
    assert loaded(tmp_path / "out.pt")["fc.weight"].shape == (4, 7)


@pytest.mark.torch
def test_one_tensor_does_not_stand_for_two_that_differ(tmp_path: Path, golden: Golden) -> None:
    one, two = (np.full((4, 4), number, np.float32) for number in (1, 2))
    with pytest.raises(MappingError) as caught:
        fill(
            arrays(tmp_path, one__kernel=one, two__kernel=two),
            "out.pt",
            "torch",
            "like_small:TiedPair",
            dry_run=True,
        )
    golden(caught.value)
    same = fill(
        arrays(tmp_path, one__kernel=one, two__kernel=one),
        str(tmp_path / "out.pt"),
        "torch",
        "like_small:TiedPair",
    )
    assert same.loaded


@pytest.mark.torch
def test_a_model_that_holds_other_values_afterwards_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    monkeypatch.setitem(model_runner.HANDLERS, "load", lambda *_, **__: {})
    with pytest.raises(MappingError) as caught:
        fill(dense(tmp_path, "fc"), str(tmp_path / "out.pt"), "torch", "like_small:Named")
    golden(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["source.npz"]


@pytest.mark.torch
@pytest.mark.parametrize(
    ("factory", "dtype", "saves"),
    [
        ("Named", np.float32, 0),
        ("TiedPair", np.float32, 0),
        ("Halves", np.float16, 0),
        ("BrainFloats", np.float32, 1),
    ],
)
def test_values_that_are_not_loaded_are_noticed(
    tmp_path: Path, factory: str, dtype: type[np.generic], saves: int
) -> None:
    kernel = np.full((4, 4), 3, dtype)
    tied = factory == "TiedPair"
    named = (
        {"one__kernel": kernel, "two__kernel": kernel}
        if tied
        else {"fc__kernel": kernel, "fc__bias": kernel[0]}
    )
    source, target = arrays(tmp_path, **named), str(tmp_path / "out.pt")
    outcome = unloaded(
        lambda: fill(source, target, "torch", f"like_small:{factory}", cast=factory == "BrainFloats")
    )
    assert outcome["path"]
    # A file of the model is compared only for types that NumPy does not have.
    assert outcome["saves"] == saves
    assert not os.path.exists(target)


WRONG = (
    "nowhere_at_all:X",
    "like_broken:raisses",
    "like_broken:raises",
    "like_broken:leaves",
    "like_broken:no_model",
    "like_broken:NUMBER",
    "like_broken",
    "like_broken.py:raises",
)


@pytest.mark.parametrize("factory", WRONG)
def test_a_wrong_factory_is_one_sentence(factory: str, tmp_path: Path, golden: Golden) -> None:
    with pytest.raises(UsageError) as caught:
        fill(dense(tmp_path, "fc"), str(tmp_path / "out.pt"), "torch", factory)
    golden(caught.value)
    assert "\n" not in str(caught.value)


def test_a_factory_that_raises_in_its_process_is_one_sentence(tmp_path: Path, golden: Golden) -> None:
    source = dense(tmp_path, "fc")
    ran = run("convert", source, tmp_path / "out.pt", "--like", "like_broken:raises", cwd=HERE)
    golden(refused(ran))


@pytest.mark.torch
def test_the_command_runs_the_users_code_in_another_process(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from torch import nn\nprint('noise')\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self, width):\n        super().__init__(nn.Linear(4, width))\n"
    )
    source = dense(tmp_path, "fc", outputs=3)
    command = ("convert", source, "out.pt", "--like", "own:Net", "--like-args", '{"width": 3}', "--json")
    ran = run(*command, cwd=tmp_path)
    assert ran.status == 0, ran.err
    document = ran.json()
    assert document["loaded"]
    assert document["matched"] == [
        {"source": "fc", "target": "0", "kind": "dense", "by": "only fit", "confidence": "medium"}
    ]
    assert run("digest", tmp_path / "out.pt", "--check", tmp_path / "out.pt.ckpttool.json").status == 0


@pytest.mark.parametrize(
    "options", [("--like-args", "{"), ("--like-args", "3"), ("--input-shape", "3,x"), ("--match", "fc")]
)
def test_options_that_make_no_sense(options: tuple[str, str], tmp_path: Path) -> None:
    ran = run("convert", dense(tmp_path, "fc"), tmp_path / "out.pt", "--like", "a:b", *options)
    assert ran.status == 2
    assert options[0] in ran.err or "shape" in ran.err


def test_what_old_interpreters_run_is_written_for_them() -> None:
    """Python 3.7 has no positional-only arguments, no walrus, no unions that are evaluated."""
    files = loaded_by(PACKAGE / "networks" / "model_runner.py", PACKAGE / "core" / "sandbox.py")
    assert {file.name for file in files} >= {"messages.py", "model_child.py", "tracing.py", "deferred.py"}
    for file in files:
        tree = ast.parse(file.read_text(), feature_version=(3, 7))
        for node in ast.walk(tree):
            assert not isinstance(node, ast.NamedExpr | ast.Match), file
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):  # a union of dicts is 3.9
                assert not any(isinstance(item, ast.Dict | ast.DictComp) for item in (node.left, node.right))
        for newer in ("removeprefix", "removesuffix", "zip(", "cached_property"):  # strict is 3.10
            assert newer not in file.read_text(), (file, newer)


PACKAGE = ROOT / "ckpttool"


def loaded_by(*files: Path) -> set[Path]:
    """Return the files of the package that are loaded when these are imported, themselves included."""
    paths: set[Path] = set()
    waiting = [*files]
    while waiting:
        file = waiting.pop()
        if file not in paths:
            paths.add(file)
            waiting += imported_files(ast.parse(file.read_text()).body)
    return paths


def imported_files(body: list[ast.stmt]) -> Iterator[Path]:
    """Yield the files of the package that statements import when they run."""
    for node in body:
        if isinstance(node, ast.If):
            checked = "TYPE_CHECKING" in ast.unparse(node.test)
            yield from imported_files([*([] if checked else node.body), *node.orelse])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ckpttool"):
            names = [f"{node.module}.{name.name}" for name in node.names]
            for name in (str(node.module), *names):
                parts = name.split(".")[1:]
                paths = [PACKAGE.joinpath(*parts).with_suffix(".py")] if parts else []
                paths += [PACKAGE.joinpath(*parts[:count], "__init__.py") for count in range(len(parts) + 1)]
                yield from (path for path in paths if path.is_file())


@pytest.mark.torch
def test_a_hidden_layer_as_wide_as_the_flattened_image_takes_no_image() -> None:
    torch = pytest.importorskip("torch")

    nn = torch.nn
    twice = [nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5)]
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Dropout(), *twice)
    facts = model_child.wrap_model(model).build([[3, 4, 4]], [])
    orders = [facts[id(layer)]["orders"]["in"] for layer in (twice[0], twice[2])]
    assert orders[0] == {"parts": [[4, 4]], "index": [4 * index + c for c in range(4) for index in range(4)]}
    assert orders[1] == {"parts": [[1, 16]], "index": None}


@pytest.mark.torch
@pytest.mark.slow
def test_a_call_is_followed_without_the_compiler_of_torch() -> None:
    program = (
        "import sys, torch; from ckpttool.networks.model_child import wrap_model\n"
        "model = torch.nn.Linear(3, 2); facts = wrap_model(model).build([[3]], [])[id(model)]\n"
        "assert facts['call'] == 0; assert 'torch._dynamo' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.torch
@pytest.mark.parametrize(
    ("words", "length", "called"), [(True, 50_000, False), (True, 32, True), (False, 50_000, True)]
)
def test_a_guessed_width_is_no_length_of_a_sequence(words: bool, length: int, called: bool) -> None:
    torch = pytest.importorskip("torch")
    calls = []

    class Reader(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(7, 4) if words else torch.nn.Linear(length, 4)

        def forward(self, x: Any) -> Any:
            calls.append(tuple(x.shape))
            return self.embed(x)

    model_child.wrap_model(Reader()).build([], [[length]])
    assert bool(calls) == called


def test_a_norm_behind_a_flattened_image_is_reordered_with_it(tmp_path: Path, golden: Golden) -> None:
    torch = pytest.importorskip("torch")
    kernels = {
        "conv/kernel": np.zeros((3, 3, 3, 4), np.float32),
        "conv/bias": np.zeros(4, np.float32),
        "fc/kernel": np.zeros((144, 5), np.float32),
        "fc/bias": np.zeros(5, np.float32),
    }
    names = ("gamma", "beta", "moving_mean", "moving_variance")
    norm = {f"bn/{name}": np.arange(144, dtype=np.float32) + n for n, name in enumerate(names)}
    np.savez(tmp_path / "flat.npz", **kernels, **norm)
    target = str(tmp_path / "x.pt")
    done = fill(str(tmp_path / "flat.npz"), target, "torch", "like_torch:FlatNorm", [(3, 8, 8)])
    assert done.digest is not None
    assert len(done.report.assumed) >= 2  # the source's orders, of the norm and of the dense layer
    state = torch.load(target, weights_only=True)
    expected = norm["bn/gamma"].reshape(6, 6, 4).transpose(2, 0, 1).reshape(-1)
    np.testing.assert_array_equal(state["bn.weight"].numpy(), expected)
    # What the shapes cannot tell is said here as without --like.
    golden("\n".join(done.report.notes))


@pytest.mark.torch
def test_rules_fill_a_model_by_the_names_of_its_tensors(tmp_path: Path) -> None:
    source, target = dense(tmp_path, "body", "head"), tmp_path / "out.pt"
    rules = tmp_path / "rules.toml"
    head = '[[rule]]\nfrom = "head/kernel"\nto = "left.weight"\nrule = "transpose"\n'
    rules.write_text(f'rest = "kinds"\n{head}[[rule]]\nfrom = "head/bias"\nto = "left/bias"\n')
    done = fill(source, str(target), "torch", "like_small:Pair", rules=str(rules))
    assert done.digest
    assert {match.by for match in done.matched} == {"given", "only fit"}
    with np.load(source) as stored:
        assert (loaded(target)["left.weight"] == stored["head/kernel"].T).all()
        assert (loaded(target)["right.weight"] == stored["body/kernel"].T).all()
    rules.write_text(head)
    left = fill(source, f"{target}.2.pt", "torch", "like_small:Pair", rules=str(rules))
    assert left.digest is None
    assert set(left.report.missing) == {"left/bias", "right/weight", "right/bias"}
    assert set(left.report.unused) == {"head/bias", "body/kernel", "body/bias"}
    rules.write_text(head.replace("left.weight", "middle.weight"))
    with pytest.raises(MappingError) as caught:
        fill(source, f"{target}.2.pt", "torch", "like_small:Pair", rules=str(rules))
    assert caught.value.path == "middle.weight"


# One layer on one side, several or another on the other.


ATTENTIONS = ("Attention", "AttentionSeparate", "AttentionFused")
FORMS_OF_ONE = [
    *((one, other) for one in ATTENTIONS for other in ATTENTIONS if one != other),
    ("ChannelsDense", "ChannelsConvolution"),
    ("ChannelsConvolution", "ChannelsDense"),
]


@pytest.mark.parametrize(("one", "other"), FORMS_OF_ONE)
def test_a_layer_fills_the_other_form_of_it(one: str, other: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    sys.path.insert(0, str(HERE))
    import like_small

    source, target = getattr(like_small, one)().eval(), getattr(like_small, other)().eval()
    torch.save(source.state_dict(), tmp_path / "source.pt")
    done = fill(str(tmp_path / "source.pt"), str(tmp_path / "out.pt"), "torch", f"like_small:{other}")
    assert done.digest, (done.report.unused, done.report.missing, done.report.notes)
    target.load_state_dict(torch.load(tmp_path / "out.pt", weights_only=True))
    batch = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert torch.allclose(source(batch), target(batch), atol=WITHIN)


def test_an_attention_of_own_layers_goes_to_keras_where_the_kind_is_given(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    sys.path.insert(0, str(HERE))
    import like_small

    from ckpttool.commands.convert import convert
    from ckpttool.formats import open_checkpoint

    layers = {}
    for name in ATTENTIONS:
        model = like_small.Attention()
        torch.save(model.state_dict(), tmp_path / "first.pt")
        if name != "Attention":
            fill(str(tmp_path / "first.pt"), str(tmp_path / f"{name}.pt"), "torch", f"like_small:{name}")
        source = "first.pt" if name == "Attention" else f"{name}.pt"
        pair = []
        for inputs in ("first.pt", source):
            target = str(tmp_path / f"{name}_{len(pair)}-1")
            done = convert(
                str(tmp_path / inputs), target, to="tf", kinds=["attn=attention:2"], sync=False, verify=False
            )
            assert done.report.complete, (done.report.unused, done.report.notes)
            tree = open_checkpoint(target).tree
            pair.append(
                {
                    tree.names[path]: bytes(leaf.read())
                    for path, leaf in tree.tensors()
                    if "attn" in tree.names[path]
                }
            )
        layers[name] = pair
    for first, other in layers.values():
        assert first == other
        assert len(first) == 8


@pytest.mark.torch
@pytest.mark.parametrize(
    ("how", "named"),
    [
        ({}, True),
        ({"part": "model"}, False),
        ({"dry_run": True}, True),
        ({"optimizer": ("none",)}, False),
    ],
)
def test_an_optimizer_that_is_left_behind_is_named(how: dict[str, Any], named: bool, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    sys.path.insert(0, str(HERE))
    import like_small

    net = like_small.Named()
    optimizer = torch.optim.NAdam(net.parameters())
    net.fc(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    done = fill(str(tmp_path / "run.pt"), str(tmp_path / "out.pt"), "torch", "like_small:Named", **how)
    assert [(entry.use, entry.what, entry.decides) for entry in done.ledger] == (
        [("not used", "optimizer", True)] if named else []
    )
    assert (done.digest is None) == ("dry_run" in how)


@pytest.mark.torch
@pytest.mark.parametrize("trained", ["all", "bias"])
def test_an_optimizer_has_the_order_of_the_filled_model(trained: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    sys.path.insert(0, str(HERE))
    import like_small

    net = like_small.Named()
    optimizer = torch.optim.Adam(net.parameters() if trained == "all" else [net.fc.bias])
    (net.fc(torch.ones(2, 4)) ** 2).sum().backward()
    optimizer.step()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    done = fill(str(tmp_path / "run.pt"), str(tmp_path / "out.pt"), "torch", "like_small:Named")
    assert not done.ledger
    assert len(done.load) == 3
    contents = torch.load(tmp_path / "out.pt", weights_only=True)
    assert str(contents["optimizer"]) == str(optimizer.state_dict())


@pytest.mark.torch
def test_an_optimizer_follows_a_model_with_another_order(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    sys.path.insert(0, str(HERE))
    import like_small

    def moments(net: Any, optimizer: Any) -> dict[str, Any]:
        return {name: optimizer.state[parameter]["exp_avg"] for name, parameter in net.named_parameters()}

    net, other = like_small.Critics(), like_small.CriticsTurned()
    optimizer = torch.optim.Adam(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    done = fill(str(tmp_path / "run.pt"), str(tmp_path / "out.pt"), "torch", "like_small:CriticsTurned")
    assert not done.ledger
    contents = torch.load(tmp_path / "out.pt", weights_only=True)
    mine = torch.optim.Adam(other.parameters())
    other.load_state_dict(contents["model"])
    mine.load_state_dict(contents["optimizer"])
    expected, actual = moments(net, optimizer), moments(other, mine)
    assert list(expected) != list(actual)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


@pytest.mark.torch
def test_a_live_optimizer_of_another_class_is_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    sys.path.insert(0, str(HERE))
    import like_small

    net = like_small.Named()
    optimizer = torch.optim.SGD(net.parameters(), 0.5, momentum=0.5)
    (net.fc(torch.ones(2, 4)) ** 2).sum().backward()
    optimizer.step()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    other = like_small.Named()
    before = str(other.state_dict())
    with pytest.raises(UsageError):
        filling.load_into(other, str(tmp_path / "run.pt"), optimizer=torch.optim.Adam(other.parameters()))
    assert str(other.state_dict()) == before
    groups = [{"params": [parameter]} for parameter in other.parameters()]
    mine = torch.optim.SGD(groups, 0.1)
    filling.load_into(other, str(tmp_path / "run.pt"), optimizer=mine)
    assert [group["momentum"] for group in mine.param_groups] == [0.5] * len(groups)
    for one, same in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[one]["momentum_buffer"], mine.state[same]["momentum_buffer"])


# Transformers' models for TensorFlow: a table is a variable of its own, TFConv1D has a bias [1, out].
OWN_TENSORS = {
    "words/weight": (7, 4),
    "attn/c_attn/weight": (4, 12),
    "attn/c_attn/bias": (1, 12),
    "attn/c_proj/weight": (4, 4),
    "attn/c_proj/bias": (1, 4),
}


@pytest.mark.torch
def test_tables_and_row_biases_of_own_layers_fill_a_model(tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    arrays = {name: draw.standard_normal(shape).astype(np.float32) for name, shape in OWN_TENSORS.items()}
    np.savez(tmp_path / "own.npz", **arrays)
    target = tmp_path / "out.pt"
    done = fill(str(tmp_path / "own.npz"), str(target), "torch", "like_small:Tokens", from_="tf")
    assert done.report.complete, (done.report.unused, done.report.notes)
    assert sum("words/weight" in sentence for sentence in done.report.assumed) == 1
    contents = loaded(target)
    assert (contents["words.weight"] == arrays["words/weight"]).all()
    for name in ("c_attn", "c_proj"):
        assert (contents[f"attn.{name}.weight"] == arrays[f"attn/{name}/weight"].T).all()
        assert (contents[f"attn.{name}.bias"] == arrays[f"attn/{name}/bias"][0]).all()


@pytest.mark.torch
def test_a_table_whose_axes_are_equally_long_is_not_copied_by_its_shape(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", **{"table/weight": np.ones((4, 4), np.float32)})
    error = fill(
        str(tmp_path / "own.npz"), str(tmp_path / "out.pt"), "torch", "like_small:Square", from_="tf"
    )
    assert not error.report.complete
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.torch
def test_a_kind_that_a_user_names_is_kept_in_what_could_be_an_attention(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    sys.path.insert(0, str(HERE))
    import like_small

    torch.save(like_small.Tokens().state_dict(), tmp_path / "source.pt")
    how: dict[str, Any] = {"kinds": ["attn/c_proj=dense"]}
    done = fill(str(tmp_path / "source.pt"), str(tmp_path / "out.pt"), "torch", "like_small:Tokens", **how)
    assert done.report.complete, (done.report.unused, done.report.notes)
