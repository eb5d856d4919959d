"""Runs other converters on the models written twice by hand: `python -m tests.model_pairs.twins_peers`.

Each runs once. They receive the source only, and return an object of their own instead of filling the user's
model. The same inputs and tolerances judge them. Needs tf2onnx, onnx2torch, nobuco, torchvision, tf_keras and
sty, which are no dependencies.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.model_pairs import harness, peers, twins
from tests.model_pairs.nobuco_peer import define_operators, import_nobuco

_SCALES = (1.0, 1e-3)
_STEPS = ("write_keras", "write_onnx", "read_torch", "convert_nobuco")


def write_keras(names: Sequence[str], folder: Path) -> None:
    """Write each Keras model, and what it computes."""
    side = twins.Keras()
    for name in names:
        (folder / name).mkdir()
        pair = twins.PAIRS[name]
        model = side.build(pair, 1)
        for form in ("keras", "weights", "saved_model"):
            with contextlib.redirect_stdout(io.StringIO()):
                side.save(model, form, folder / name, pair)
        for number, scale in enumerate(_SCALES):
            np.savez(folder / name / f"outputs{number}.npz", *side.outputs(model, pair, 5, scale))


def write_onnx(names: Sequence[str], folder: Path) -> None:
    """Convert each SavedModel to ONNX."""
    from tf2onnx import convert

    for name in names:
        at = folder / name

        def export(at: Path = at) -> None:
            files = ["--saved-model", str(at / "saved_model"), "--output", str(at / "m.onnx")]
            sys.argv = ["tf2onnx.convert", *files, "--opset", "17"]
            convert.main()

        peers.report(peers.timed(peers.TWINS + name, "torch", "export", export))


def read_torch(names: Sequence[str], folder: Path) -> None:
    """Read each Keras model by Keras 3 on PyTorch, and its ONNX file by onnx2torch; compare the outputs."""
    import keras
    import torch

    define_operators()  # onnx2torch imports torchvision
    import onnx2torch

    assert keras.backend.backend() == "torch"

    def compare(name: str, call: Callable[[list[np.ndarray]], Any]) -> None:
        for number, (scale, close) in enumerate(zip(_SCALES, (twins.CLOSE, twins.CLOSE_SMALL), strict=True)):
            with np.load(folder / name / f"outputs{number}.npz") as file:
                expected = [file[key] for key in file.files]
            with torch.no_grad():
                results = twins.flat(call(twins.random_inputs(twins.PAIRS[name], "keras", 5, scale)))
            _compare([result.numpy() for result in results], expected, close)

    def keras_model(model: Any) -> Callable[[list[np.ndarray]], Any]:
        def call(arrays: list[np.ndarray]) -> Any:
            tensors = [torch.from_numpy(x.astype("int32") if x.dtype.kind == "i" else x) for x in arrays]
            return model(tensors if len(tensors) > 1 else tensors[0])

        return call

    def whole(name: str) -> None:
        compare(name, keras_model(keras.models.load_model(folder / name / "m.keras")))

    def code(name: str) -> None:
        with torch.no_grad():
            model = twins.Keras().build(twins.PAIRS[name], 7)
        model.load_weights(folder / name / "m.weights.h5")
        compare(name, keras_model(model))

    def onnx(name: str) -> None:
        import onnx as onnx_library

        file = str(folder / name / "m.onnx")
        module = onnx2torch.convert(file).eval()
        inputs = onnx_library.load(file).graph.input

        def call(arrays: list[np.ndarray]) -> Any:
            # The signature of a SavedModel sorts its inputs: each gets the array of its shape and kind.
            left, chosen = list(arrays), []
            for input_ in inputs:
                extents = [axis.dim_value for axis in input_.type.tensor_type.shape.dim][1:]
                fits = (
                    index
                    for index, x in enumerate(left)
                    if len(extents) == x.ndim - 1
                    and all(a in (0, b) for a, b in zip(extents, x.shape[1:], strict=True))
                )
                array = left.pop(next(fits))
                dtype = onnx_library.helper.tensor_dtype_to_np_dtype(input_.type.tensor_type.elem_type)
                chosen.append(torch.from_numpy(array.astype(dtype)))
            return module(*chosen)

        compare(name, call)

    for name in names:
        for tool, run in (("keras_torch", whole), ("keras_torch_weights", code), ("onnx2torch", onnx)):
            keras.utils.clear_session()
            peers.report(peers.timed(peers.TWINS + name, "torch", tool, lambda run=run, name=name: run(name)))


def convert_nobuco(names: Sequence[str], folder: Path) -> None:
    """Convert each PyTorch module by nobuco; compare the outputs."""
    del folder
    nobuco = import_nobuco()
    import torch

    for name in names:

        def convert(name: str = name) -> None:
            pair = twins.PAIRS[name]
            net = twins.Torch().build(pair, 1)
            order = nobuco.ChannelOrder.PYTORCH
            example = [torch.from_numpy(x) for x in twins.random_inputs(pair, "torch", 5)]
            model = nobuco.pytorch_to_keras(
                net, args=example, inputs_channel_order=order, outputs_channel_order=order
            )
            for scale, close in zip(_SCALES, (twins.CLOSE, twins.CLOSE_SMALL), strict=True):
                arrays = twins.random_inputs(pair, "torch", 5, scale)
                results = twins.flat(model(arrays if len(arrays) > 1 else arrays[0]))
                with torch.no_grad():
                    expected = twins.flat(net(*map(torch.from_numpy, arrays)))
                _compare([np.asarray(item) for item in results], [item.numpy() for item in expected], close)

        peers.report(peers.timed(peers.TWINS + name, "keras", "nobuco", convert))


def _compare(results: Sequence[np.ndarray], expected: Sequence[np.ndarray], close: float) -> None:
    """Raise WrongError unless the results are the wanted ones, in their order or another."""
    if len(results) != len(expected):
        raise harness.WrongError(f"{len(results)} outputs instead of {len(expected)}")
    left = list(results)
    for array in expected:
        fits = [
            index
            for index, other in enumerate(left)
            if other.shape == array.shape and twins.error([array], [other]) <= close
        ]
        if not fits:
            raise harness.WrongError(f"no output is the wanted one of shape {array.shape}")
        del left[fits[0]]


def run(names: Sequence[str], folder: Path) -> Iterable[peers.Outcome]:
    """Run each step in a process of its own; yield the outcomes."""
    exported: dict[tuple[str, str], peers.Outcome] = {}
    for step in _STEPS:
        env = {**os.environ, **({"KERAS_BACKEND": "torch"} if step == "read_torch" else {})}
        command = [sys.executable, "-m", __spec__.name, "--step", step, "--folder", str(folder), *names]
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)
        outcomes = peers.read_outcomes(done.stdout)
        if done.returncode:
            print(f"{step} ended with {done.returncode}", file=sys.stderr)  # noqa: T201
        exported |= {(row.target, row.program): row for row in outcomes if row.tool == "export"}
        for outcome in outcomes:
            if outcome.tool != "export":
                yield peers.joined(outcome, exported) if outcome.tool == "onnx2torch" else outcome


def main() -> None:
    """Run the converters on the pairs, and record what they do."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--of", default="0/1", help="which part of the pairs, such as 1/3")
    parser.add_argument("--record", action="store_true", help=f"write {peers.RESULTS.name}")
    parser.add_argument("--step", choices=_STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        if options.step != "write_onnx":
            twins.load_families()
        globals()[options.step](options.names, Path(options.folder))
        return
    part, of = map(int, options.of.split("/"))
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        for item in run((options.names or twins.usual_names())[part::of], Path(folder)):
            outcomes.append(item)
            print(item.program, item.tool, item.state, item.sentence[:120], flush=True)  # noqa: T201
    if options.record:
        peers.record(outcomes)


if __name__ == "__main__":
    main()
