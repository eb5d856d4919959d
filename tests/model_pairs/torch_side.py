"""The programs in PyTorch: built, saved in every form, filled and judged. Runs in a process with PyTorch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.model_pairs.programs import Line, Program, program

_CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_CONVT = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_NORM = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_POOL = {1: nn.functional.max_pool1d, 2: nn.functional.max_pool2d, 3: nn.functional.max_pool3d}
EPSILON = 1e-3


def _layer(line: Line) -> nn.Module | None:
    args, shape, output_shape = line.args, line.ins[0].shape, line.out.shape
    rank = len(shape) - 1
    if line.op in ("conv", "convt"):
        kinds = _CONV if line.op == "conv" else _CONVT
        return kinds[rank](shape[0], output_shape[0], args["kernel"], args["stride"])
    if line.op == "td_conv":
        return nn.Conv2d(shape[1], output_shape[1], args["kernel"])
    if line.op == "depthwise":
        return _CONV[rank](shape[0], shape[0], args["kernel"], groups=shape[0])
    if line.op == "dense":
        return nn.Linear(shape[-1], output_shape[-1], bias=args.get("bias", True))
    if line.op == "bn":
        return _NORM[rank](shape[0], eps=EPSILON)
    if line.op == "ln":
        return nn.LayerNorm(shape[-1], eps=EPSILON)
    if line.op == "prelu":
        return nn.PReLU(shape[0])
    if line.op in ("lstm", "gru"):
        return (nn.LSTM if line.op == "lstm" else nn.GRU)(shape[-1], output_shape[-1], batch_first=True)
    if line.op == "attention":
        return nn.MultiheadAttention(shape[-1], args["heads"], batch_first=True)
    if line.op == "embed":
        return nn.Embedding(args["words"], output_shape[-1])
    if line.op == "positions":
        return Positions(shape)
    return None


class Positions(nn.Module):
    """A trained table of positions, added."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class Net(nn.Module):
    """A program's model; its layers are attributes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.program = program(name)
        for line in self.program.lines:
            layer = _layer(line)
            if layer is not None and not hasattr(self, self._name(line)):
                self.add_module(self._name(line), layer)

    def _name(self, line: Line) -> str:
        return self.program.torch_names.get(line.name, line.name)

    def forward(self, *inputs: Tensor) -> Any:
        values = {input_.number: x for input_, x in zip(self.program.inputs, inputs, strict=True)}
        for line in self.program.lines:
            layer = self.get_submodule(self._name(line)) if line.name else None
            values[line.out.number] = _step(line, layer, [values[value.number] for value in line.ins])
        results = tuple(values[output.number] for output in self.program.outputs)
        return results if len(results) > 1 else results[0]


def _step(line: Line, layer: Any, tensors: list[Tensor]) -> Tensor:
    x, op = tensors[0], line.op
    if op in ("lstm", "gru"):
        y = layer(x)[0]
        return y if line.args["sequences"] else y[:, -1]
    if op == "attention":
        return layer(x, x, x, need_weights=False)[0]
    if op == "td_conv":
        y = layer(x.flatten(0, 1))
        return y.reshape(len(x), x.shape[1], *y.shape[1:])
    if layer is not None:
        return layer(x)
    if op == "flatten":
        start = 2 if line.ins[0].kind == "frames" else 1
        if line.args["order"] == "last":
            x = torch.movedim(x, start, -1)
        return x.flatten(start)
    if op == "image":
        if line.args["order"] == "last":
            channels, *size = line.out.shape
            return torch.movedim(x.reshape(len(x), *size, channels), -1, 1)
        return x.reshape(len(x), *line.out.shape)
    if op == "attend":
        q, k, v = tensors
        return torch.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5, -1) @ v
    size = len(line.ins[0].shape) - 1
    return {
        "relu": lambda: torch.relu(x),
        "pool": lambda: _POOL[size](x, 2),
        "gap": lambda: x.mean(tuple(range(2, size + 2))),
        "mean": lambda: x.mean(1),
        "shuffle": lambda: torch.pixel_shuffle(x, line.args["factor"]),
        "unshuffle": lambda: torch.pixel_unshuffle(x, line.args["factor"]),
        "scale": lambda: x * tensors[1][(...,) + (None,) * size],
        "step": lambda: x.unsqueeze(1),
        "rows": lambda: x.flatten(1),
        "patches": lambda: x.flatten(2).transpose(1, 2),
        "concat": lambda: torch.cat(tensors, 1 if line.out.kind == "image" else -1),
        "add": lambda: tensors[0] + tensors[1],
        "multiply": lambda: tensors[0] * tensors[1],
    }[op]()


def build(name: str, seed: int = 0) -> Net:
    """Return a program's model with random weights and statistics."""
    torch.manual_seed(seed)
    net = Net(name).eval()
    with torch.no_grad():
        for key, value in net.state_dict().items():
            if value.is_floating_point():
                scale = 1.5 / max(1, value[0].numel()) ** 0.5 if value.ndim > 1 else 0.5
                value.copy_(torch.randn_like(value) * scale)
                if key.endswith("running_var"):
                    value.copy_(value.abs() + 0.5)
    return net


def inputs(twin: Program, seed: int = 1) -> list[np.ndarray]:
    """Return random inputs as PyTorch takes them."""
    draw = np.random.default_rng(seed)
    return [
        draw.integers(0, twin.words, (3, *input_.shape))
        if input_.kind == "tokens"
        else draw.standard_normal((3, *input_.shape)).astype(np.float32)
        for input_ in twin.inputs
    ]


def outputs(net: Net) -> list[np.ndarray]:
    """Return what the model makes of the program's inputs, images with their channels first."""
    with torch.no_grad():
        results = net.eval()(*map(torch.from_numpy, inputs(net.program)))
    return [tensor.numpy() for tensor in (results if isinstance(results, tuple) else (results,))]


def save(name: str, folder: Path, sources: Sequence[str]) -> None:
    """Write the model in these forms beside the outputs that it has."""
    from safetensors.torch import save_file

    net = build(name)
    torch.save(net.state_dict(), folder / "torch.pt")
    torch.save(net, folder / "whole.pt")
    state = {key: value.contiguous() for key, value in net.state_dict().items()}
    save_file(state, folder / "torch.safetensors", metadata={"format": "pt"})
    np.savez(folder / "torch.npz", **{key: value.numpy() for key, value in state.items()})
    tensors = tuple(map(torch.from_numpy, inputs(net.program)))
    if "script" in sources:
        with torch.no_grad():
            torch.jit.trace(net, tensors, check_trace=False).save(str(folder / "script.pt"))
    if "onnx" in sources:
        import warnings

        # Without gradients an attention is one operation, which the exporter does not know.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Norms stay layers of their own.
            kept = torch.onnx.TrainingMode.PRESERVE
            torch.onnx.export(net, tensors, str(folder / "model.onnx"), dynamo=False, training=kept)
    np.savez(folder / "torch_outputs.npz", *outputs(net))


def shapes(twin: Program) -> list[tuple[int, ...]]:
    """Return the shapes of a program's inputs in PyTorch."""
    return [input_.shape for input_ in twin.inputs]


def _renamed(key: str, places: dict[str, str]) -> str:
    layer, _, weight = key.rpartition(".")
    return f"{places[layer.removeprefix('variables.')]}.{weight}"


def _loaded(net: Net, state: dict[str, Tensor]) -> Net:
    net.load_state_dict(state, strict=True)
    return net


def load(name: str, file: Path) -> Net:
    """Return a model that loaded what was written for it; raise what PyTorch raises."""
    net = build(name, 5)
    state = torch.load(file, weights_only=True)
    expected = net.state_dict()
    if state.keys() != expected.keys():
        # Keras's numbered layers, and the list of variables that it exports, in the order of the model.
        layers = dict.fromkeys(key.rpartition(".")[0].removeprefix("variables.") for key in state)
        own = dict.fromkeys(key.rpartition(".")[0] for key in expected)
        listed = file.with_name("names.json")
        known = json.loads(listed.read_text(encoding="utf-8")) if listed.exists() else {}
        named = [known.get(f"_operations/{layer.rpartition('.')[2]}") for layer in layers]
        actual = {net.program.torch_names.get(name, name) for name in named if name}
        if None not in named and actual == set(own):
            # Checkpoints of Keras's objects number the layers.
            places = {
                layer: net.program.torch_names.get(str(name), str(name))
                for layer, name in zip(layers, named, strict=True)
            }
            return _loaded(net, {_renamed(key, places): value for key, value in state.items()})
        numbered = all(layer.isdecimal() for layer in layers)
        names = sorted(layers, key=int) if numbered else list(layers)
        if len(layers) == len(own) and (numbered or set(names) == set(own)):
            places = dict(zip(names, own, strict=True)) if numbered else {name: name for name in names}
            state = {
                f"{places[key.rpartition('.')[0].removeprefix('variables.')]}.{key.rpartition('.')[2]}": value
                for key, value in state.items()
            }
    net.load_state_dict(state, strict=True)
    return net
