"""Faults planted in one of two models, and what `verify` of both finds: `python -m tests.planted_faults`.

The models are those of pair_models.py in PyTorch and of pair_keras.py in Keras. In each direction A is the
right source and B the conversion with the fault.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import verifying
from ckpttool.commands.verify import Verification, verify
from ckpttool.networks import ModelSpec
from tests import pair_models, warm
from tests.conftest import ROOT
from tests.pair_models import SHAPES
from tests.shared_runners import shared_runners

State = dict[str, Any]
DIRECTIONS = ("torch-keras", "keras-torch")
# Names of layers of the PyTorch models, where Keras's differ.
KERAS_NAMES: dict[str, dict[str, str]] = {
    "mlp": {"0": "first", "2": "second", "4": "third"},
    "cnn": {"0": "conv", "1": "norm", "4": "conv2", "7": "head"},
    "activated": {"0": "first", "1": "first", "2": "second", "3": "norm"},
}


@dataclass(frozen=True)
class Fault:
    """A change of the state or of the code's options, and the layer where it must be found.

    `words` is a pattern for the cause. `keras` are the fields that are otherwise where B is a Keras model.
    """

    model: str
    layer: str
    change: Callable[[State], None] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    right: dict[str, Any] = field(default_factory=dict)
    where: str = "layer"
    words: str = ""
    keras: dict[str, Any] = field(default_factory=dict)


def put(name: str, make: Callable[[Any], Any]) -> Callable[[State], None]:
    """Return a change of one tensor."""

    def change(state: State) -> None:
        state[name] = make(state[name]).contiguous()

    return change


def blocks(count: int, *order: int) -> Callable[[Any], Any]:
    """Return a change of the order of a tensor's blocks."""

    def turned(value: Any) -> Any:
        import torch

        return torch.cat([value.chunk(count)[place] for place in order])

    return turned


def on_all(make: Callable[[Any], Any], words: str = "") -> Callable[[State], None]:
    """Return a change of all tensors of floats whose names contain the words."""

    def change(state: State) -> None:
        for name, value in state.items():
            if words in name and value.dtype.is_floating_point:
                state[name] = make(value).contiguous()

    return change


def swap(*names: str) -> Callable[[State], None]:
    """Return an exchange of two layers' tensors."""

    def change(state: State) -> None:
        for end in ("weight", "bias"):
            one, other = (f"{name}.{end}" for name in names)
            state[one], state[other] = state[other], state[one]

    return change


def without(*words: str) -> Callable[[State], None]:
    """Return a change that removes tensors."""

    def change(state: State) -> None:
        for name in [name for name in state if any(word in name for word in words)]:
            del state[name]

    return change


def averaged(value: Any) -> Any:
    """Return what a moving average may hold."""
    return value * 0.98 + 0.01 * value.flip(0)


def untied(state: State) -> None:
    """Give the output layer numbers of its own."""
    state["out.weight"] = state["out.weight"] * 0.5


def forgotten_statistics(state: State) -> None:
    """Reset a batch norm's statistics."""
    state["1.running_mean"] = state["1.running_mean"] * 0
    state["1.running_var"] = state["1.running_var"] * 0 + 1


STRAIGHT = {"stride": (1, 1)}  # Keras has no dilation of a strided convolution
FAULTS = {
    "LoRA dropped": Fault("text", "mix", without("lora"), {"lora": False}, words="lora_a, lora_b"),
    "BN statistics not copied": Fault("cnn", "1", forgotten_statistics, words="statistics"),
    "epsilon": Fault("block", "norm", options={"eps": 1e-6}, words="epsilon is 1e-05 in A and 1e-06"),
    "padding": Fault("vision", "conv", options={"padding": 0}, words="padding"),
    "exact against tanh gelu": Fault(
        "block", "up|down", options={"approximate": "tanh"}, where="between", words="exact gelu, .* tanh gelu"
    ),
    "transposed square kernel": Fault("mlp", "2", put("2.weight", lambda x: x.T), words="transposed"),
    "swapped heads": Fault(
        "block",
        "attention",
        put("attention.in_proj_weight", blocks(6, 1, 0, 2, 3, 4, 5)),
        words="order",
    ),
    "bfloat16 cast": Fault("mlp", "0", on_all(lambda x: x.bfloat16().float()), words="bfloat16"),
    "normaliser": Fault(
        "vision", "conv", without("mean"), {}, {"mean": (0.1, 0.5, 0.9)}, where="between", words="normaliser"
    ),
    "permuted flatten": Fault(
        "cnn",
        "7",
        put("7.weight", lambda x: x.reshape(4, 5, 2, 3).permute(0, 2, 3, 1).reshape(4, 30)),
        words="order",
        keras={"change": put("7.weight", lambda x: x.reshape(4, 2, 3, 5).permute(0, 3, 1, 2).reshape(4, 30))},
    ),
    "EMA for raw weights": Fault("mlp", "0", on_all(averaged), words="EMA"),
    "missing bias": Fault("vision", "conv2", without("conv2.bias"), {"bias": False}, words="bias"),
    "wrong activation": Fault("activated", "1", options={"activation": "SiLU"}, words="silu"),
    "q/k swapped": Fault(
        "block", "attention", on_all(blocks(3, 1, 0, 2), "in_proj"), words="queries|query|order"
    ),
    "dropped position embedding": Fault(
        "text",
        "query|key",  # both receive it, in either order
        without("position"),
        {"position": False},
        where="between",
        words="position",
    ),
    "gate order of LSTM": Fault("lstm", "rnn", on_all(blocks(4, 0, 2, 1, 3), "rnn."), words="gates|order"),
    "gate order of GRU": Fault("gru", "rnn", on_all(blocks(3, 1, 0, 2), "rnn."), words="gates|order"),
    "dilation": Fault(
        "vision", "conv2", options={**STRAIGHT, "dilation": 2}, right=STRAIGHT, words="dilation"
    ),
    "stride order": Fault("vision", "conv2", options={"stride": (1, 2)}, words="stride"),
    "dropout left on": Fault(
        "text",
        "mix",
        options={"dropout": True},
        where="between",
        words="dropout",
        keras={"layer": "dropout.*"},  # a layer there
    ),
    "channel order": Fault("cnn", "0", put("0.weight", lambda x: x.flip(1)), words="reverse"),
    "layer order": Fault("text", "mix", swap("mix", "up"), words="weights of A's up"),
    "wrong statistics axis": Fault("text", "mix", options={"axis": 1}, where="between"),
    "tied weights untied": Fault(
        "text",
        "out|outputs",  # Keras's tied layer has no tensors, and is no layer of a pair
        untied,
        {"tied": False},
        words="tied|embed|out",
    ),
    "frozen scale": Fault("text", "up", without("scale"), {"scale": False}, where="between", words="scale"),
    "q/k layers swapped": Fault("text", "key|query", swap("query", "key"), words="key|query"),
    "padding mode": Fault("vision", "conv", options={"mode": "reflect"}, words="mode|padding"),
    "pooling": Fault("vision", "pool", options={"pool": True}, words="counting of padding"),
}
# The others are variants.
PROMISED = [name for name in FAULTS if name not in ("q/k layers swapped", "padding mode", "pooling")]
# Located; the cause is a computation between layers, which is not searched.
UNNAMED = ("wrong statistics axis",)


@dataclass(frozen=True)
class Finding:
    """What `verify` finds of a fault in one direction."""

    fault: str
    direction: str
    expected: str
    found: bool
    layer: str
    where: str
    confirmed: bool
    cause: str
    layer_right: bool
    cause_right: bool


def spec(framework: str, model: str, options: Mapping[str, Any] | None = None) -> ModelSpec:
    """Return the factory of a model."""
    return ModelSpec(f"pair_{framework}:{model}", dict(options or {}) or None)


def framework_of(factory: str) -> str:
    """Return the framework of a factory of these models."""
    return "tensorflow" if factory.startswith("pair_keras") else "torch"


class Sides:
    """The files of right models and of faults in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._keras: list[dict[str, Any]] = []
        self._written: dict[str, str] = {}

    def torch(self, title: str, model: str, right: Mapping[str, Any], change: Any = None) -> str:
        """Write a state_dict, as `.pt` and `.npz`; return the `.pt` file."""
        import numpy as np
        import torch

        state = dict(pair_models.torch_state(model, **right))
        state = {name: value.clone() for name, value in state.items()}
        if change is not None:
            change(state)
        file = str(self._folder / f"{title}.pt")
        torch.save(state, file)
        np.savez(self._folder / f"{title}.npz", **{name: value.numpy() for name, value in state.items()})
        return file

    def keras(self, title: str, model: str, options: Mapping[str, Any]) -> str:
        """List a Keras model with the numbers of a written state_dict; return its file."""
        file = f"{title}.weights.h5" if model == "text" else f"{title}.keras"
        row = {"file": file, "model": model, "options": dict(options), "state": f"{title}.npz"}
        self._keras.append(row)
        return str(self._folder / file)

    def write(self) -> None:
        """Write the Keras models."""
        (self._folder / "keras.json").write_text(json.dumps(self._keras), encoding="utf-8")
        program = "from pathlib import Path; from tests import pair_keras; pair_keras.write(Path.cwd())"
        status, output = warm.run("tensorflow", program, self._folder)
        if status:
            raise RuntimeError(output[-4000:])


def slug(title: str) -> str:
    """Return a file name."""
    return re.sub(r"\W+", "_", title)


class PlantedFaults:
    """Right and wrong files for some faults, and their comparison in both directions."""

    def __init__(self, folder: Path, names: Sequence[str] = tuple(FAULTS)) -> None:
        self.names = list(names)
        sides = Sides(folder)
        self._files: dict[tuple[str, str, str], str] = {}
        for name in self.names:
            fault, title = FAULTS[name], slug(name)
            for framework in ("torch", "keras"):
                change = fault.keras.get("change", fault.change) if framework == "keras" else fault.change
                right = sides.torch(f"{title}_right", fault.model, fault.right)
                wrong = sides.torch(f"{title}_{framework}", fault.model, fault.right, change)
                if framework == "keras":
                    wrong = sides.keras(f"{title}_keras", fault.model, {**fault.options})
                    self._files[name, "keras", "right"] = sides.keras(
                        f"{title}_right", fault.model, fault.right
                    )
                else:
                    self._files[name, "torch", "right"] = right
                self._files[name, framework, "wrong"] = wrong
        sides.write()

    def compare(self, name: str, direction: str) -> Verification:
        """Run `verify` with the right source as A, and the fault in B."""
        fault = FAULTS[name]
        a, b = direction.split("-")
        files = (self._files[name, a, "right"], self._files[name, b, "wrong"])
        likes = [
            None
            if file.endswith(".keras")
            else spec("models" if framework == "torch" else "keras", fault.model, options)
            for file, framework, options in zip(files, (a, b), (fault.right, fault.options), strict=True)
        ]
        shape = SHAPES[fault.model]
        if a == "keras" and shape.count(",") == 2:
            first, *rest = shape.split(",")
            shape = ",".join((*rest, first))
        shapes = () if files[0].endswith(".keras") else (shape,)
        return verify(*files, like_a=likes[0], like_b=likes[1], input_shapes=shapes)

    def find(self, name: str, direction: str) -> Finding:
        """Return what the comparison finds."""
        fault = FAULTS[name]
        try:
            made = self.compare(name, direction)
        except Exception as error:  # noqa: BLE001  # a crash is a finding
            return Finding(
                name, direction, "", False, "", "", False, f"{type(error).__name__}: {error}", False, False
            )
        first = made.models.first if made.models is not None else None
        expected = fault.layer
        if direction.endswith("keras"):
            expected = fault.keras.get("layer", KERAS_NAMES.get(fault.model, {}).get(expected, expected))
        words = fault.keras.get("words", fault.words) if direction.endswith("keras") else fault.words
        cause = "" if first is None else first.cause or ""
        return Finding(
            name,
            direction,
            expected,
            not made.within,
            "" if first is None else first.b,
            "" if first is None else first.where,
            first is not None and first.confirmed,
            cause,
            first is not None and re.fullmatch(expected, first.b) is not None,
            bool(cause) and re.search(words, cause, re.IGNORECASE) is not None,
        )

    def findings(self) -> Iterator[Finding]:
        """Compare all in both directions, with one process for each framework."""
        with shared_runners(framework_of):
            for name in self.names:
                for direction in directions(name):
                    yield self.find(name, direction)


def directions(name: str) -> tuple[str, ...]:
    """Return the directions in which a fault can be planted: Keras has no mode of padding."""
    return DIRECTIONS[1:] if name == "padding mode" else DIRECTIONS


def recorded() -> list[dict[str, Any]]:
    """Return the recorded rows."""
    return list(verifying.figures()["faults"])


def main() -> None:
    """Print a row for each fault and direction."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="patterns of faults")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--record", action="store_true", help="keep the rows")
    options = parser.parse_args()
    names = [
        name for name in FAULTS if not options.names or any(re.search(each, name) for each in options.names)
    ]
    path = (str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in PlantedFaults(Path(folder), names).findings():
            rows.append(asdict(row))
            if not options.json:
                marks = "".join("-+"[each] for each in (row.found, row.layer_right, row.cause_right))
                print(  # noqa: T201
                    f"{marks} {row.fault:28} {row.direction:12} {row.expected:10} {row.layer:10} "
                    f"{row.where:8} {row.confirmed!s:5} {row.cause}",
                    flush=True,
                )
    if options.json:
        print(json.dumps(rows, indent=1))  # noqa: T201
    if options.record:
        verifying.record("faults", rows)


if __name__ == "__main__":
    main()
