"""Loads what a conversion wrote as a PyTorch user does, strictly, and compares it with the source."""

from __future__ import annotations

import builtins
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.everyday import torch_nets as nets
from tests.everyday.cases import NAMES, Case
from tests.everyday.verdicts import DifferenceError, LoadingError, by_name, compare_outputs, compare_steps

_FEW = 5  # layers whose orders are all tried
ELSEWHERE = ("target", "ema", "critic", "qf", "average")


def judge(case: Case, column: str, path: str, reference: dict[str, np.ndarray], lines: str) -> None:
    """Raise LoadingError or DifferenceError unless the result at the path is what the source was.

    A PyTorch file is loaded by the `lines` that the conversion printed.
    """
    if column == "torch":
        _torch(case, reference, lines)
    else:
        {"safetensors": _safetensors, "npz": _npz, "onnx": _onnx}[column](case, path, reference)


class _Loaded:
    """An object of a user's program that has not been made: keeps what a line loads into it."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.strict = True

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Keep the state for an object with these names."""
        self.state, self.strict = dict(state), strict


class _Program(dict[str, Any]):
    """The names of a user's program: each that a line uses is an object of it."""

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        self[name] = _Loaded()
        return self[name]


def _torch(case: Case, reference: dict[str, np.ndarray], lines: str) -> None:
    """Fill a user's model and optimizer by the printed lines."""
    if not lines:
        raise LoadingError("no line that loads it was printed")
    program = _Program(torch=torch)
    try:
        exec(compile(lines, "<load>", "exec"), {}, program)
    except Exception as error:
        raise LoadingError(f"the printed lines: {type(error).__name__}: {str(error)[:200]}") from error
    loaded = {name: value for name, value in program.items() if isinstance(value, _Loaded)}
    whole = [(name, value) for name, value in program.items() if isinstance(value, nn.Module)]
    tools = [(name, item.state) for name, item in loaded.items() if "param_groups" in item.state]
    models = [(name, item.state) for name, item in loaded.items() if "param_groups" not in item.state]
    net, where = _network(case, [*models, *((name, module.state_dict()) for name, module in whole)])
    if where.partition("/")[0] in loaded and not loaded[where.partition("/")[0]].strict:
        raise LoadingError("the printed lines load the network with strict=False")
    compare_outputs(nets.outputs(net, case.net), reference["outputs"])
    if "continued" in reference:
        tool = _optimizer(case, net, by_name(tools, where))
        if not case.differs:
            compare_steps(nets.continued(net, case.net, tool), reference)


def _network(case: Case, dicts: Sequence[tuple[str, dict[Any, Any]]]) -> tuple[nn.Module, str]:
    """Fill a user's model from the one dict that a user would take."""
    if "." in case.layers[0]:
        return _actor(case, dicts), "actor"
    reasons = []
    ordered = sorted(dicts, key=lambda d: any(word in d[0].lower() for word in ELSEWHERE))
    for path, entries in ordered:
        tensors = {k: v for k, v in entries.items() if isinstance(k, str) and isinstance(v, torch.Tensor)}
        tensors = {k: v for k, v in tensors.items() if k not in {"action_scale", "action_bias"}}
        if not tensors or "exp_avg" in tensors:
            continue
        for prefix, names in _namings(case, list(tensors)):
            net = nets.build(case.net, names, epsilon=_epsilon(case))
            state = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            if any(k for k in tensors if not k.startswith(prefix)):
                reasons.append(f"{path or 'the root'} has other entries beside {prefix}")
                continue
            try:
                net.load_state_dict(state, strict=True)
            except RuntimeError as error:
                reasons.append(" ".join(str(error).split())[:200])
                continue
            return net, f"{path}/{prefix}".strip("/.")
    raise LoadingError(f"no strict load: {'; '.join(reasons[:2]) or 'no dict of tensors'}")


def _actor(case: Case, dicts: Sequence[tuple[str, dict[Any, Any]]]) -> nn.Module:
    """Fill a policy from an agent's actor, whose layers are deeper and stand beside others."""
    net = nets.build(case.net)
    for _, entries in sorted(dicts, key=lambda d: any(word in d[0].lower() for word in ELSEWHERE)):
        state = {}
        for own, layer in zip(NAMES[case.net], case.layers, strict=True):
            for kind in ("weight", "bias"):
                ending = f".{layer}.{kind}"
                values = [v for k, v in entries.items() if isinstance(k, str) and f".{k}".endswith(ending)]
                # The actor stands before its target.
                state.update({f"{own}.{kind}": v for v in values[:1]})
        if len(state) == len(net.state_dict()):
            net.load_state_dict(state, strict=True)
            return net
    raise LoadingError("no actor of this form")


def _epsilon(case: Case) -> float:
    return 1e-5 if case.side == "torch" else 1e-3


def _namings(case: Case, keys: list[str]) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield prefixes of keys, and names of layers, that a user's model could have."""
    firsts = {case.layers[0], "self_attn"}
    for key in keys:
        steps = key.split(".")
        for index, step in enumerate(steps):
            if step in firsts:
                yield ".".join([*steps[:index], ""]), case.layers
                break
        else:
            continue
        break
    modules = list(dict.fromkeys(key.rsplit(".", 1)[0] for key in keys))
    if len(modules) == len(case.layers):
        parents = {m.rpartition(".")[0] for m in modules}
        names = [m.rpartition(".")[2] for m in modules]
        orders = itertools.permutations(names) if len(names) <= _FEW else [tuple(names)]
        plain = all(name.isidentifier() or name.isdigit() for name in names)
        usual = all(p.isidentifier() and not p.startswith("_") for p in ".".join(parents).split(".") if p)
        if len(parents) == 1 and plain and usual:
            (parent,) = parents
            # A file of Keras may list attributes by name: shapes say which layer is which.
            for order in orders:
                yield (f"{parent}." if parent else ""), order


def _optimizer(
    case: Case, net: nn.Module, states: Sequence[tuple[str, dict[Any, Any]]]
) -> torch.optim.Optimizer:
    """Fill a user's optimizer, which has the network's parameters in their order."""
    if not states:
        raise LoadingError("the result has no optimizer")
    assert case.optimizer
    parameters: Any = list(net.parameters())
    if case.name == "adamw_groups":
        parameters = [
            {"params": [p for p in parameters if p.ndim > 1]},
            {"params": [p for p in parameters if p.ndim == 1]},
        ]
    tool = nets.optimizer(case.optimizer, parameters)
    try:
        tool.load_state_dict(states[0][1])
    except (ValueError, KeyError) as error:
        raise LoadingError(f"optimizer.load_state_dict: {error}") from error
    if case.rate_elsewhere:
        for group in tool.param_groups:
            group["lr"] = nets.optimizer(case.optimizer, [torch.zeros(1)]).defaults["lr"]
    return tool


def _safetensors(case: Case, path: str, reference: dict[str, np.ndarray]) -> None:
    from safetensors.torch import load_file

    tensors = load_file(path)
    # `safetensors.torch.save_model` keeps a shared weight once, and `load_model` shares it again.
    for key in [k for k in tensors if case.net == "tied" and k.endswith("embed.weight")]:
        tensors.setdefault(key.replace("embed", "decoder"), tensors[key])
    if "." in case.layers[0]:
        net = _actor(case, [("", tensors)])
        compare_outputs(nets.outputs(net, case.net), reference["outputs"])
        return
    tensors = {k: v for k, v in tensors.items() if not re.match(r"(\w+_)?opt(imizer)?\w*[./]", k)}
    prefixes = {k.rsplit(f"{case.layers[0]}.", 1)[0] for k in tensors if f"{case.layers[0]}." in k}
    prefixes = {
        p for p in prefixes if not any(word in p for word in ("state", "slot", "m.", "v."))
    } or prefixes
    groups = [
        (p, {k.removeprefix(p): v for k, v in tensors.items() if k.startswith(p)}) for p in sorted(prefixes)
    ]
    names = set(nets.build(case.net, case.layers).state_dict())
    for index, (prefix, group) in enumerate(groups):
        if case.optimizer or len(groups) > 1 or len(group) > len(names):
            groups[index] = prefix, {k: v for k, v in group.items() if k in names}
    net, _ = _network(case, groups or [("", tensors)])
    compare_outputs(nets.outputs(net, case.net), reference["outputs"])


def _npz(case: Case, path: str, reference: dict[str, np.ndarray]) -> None:
    """Find every array of the source's network, bit for bit, under a name that ends as its own."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    for key, expected in reference.items():
        if not key.startswith("weight:"):
            continue
        ending = key.rpartition(".")[2].rpartition("/")[2].lstrip("_")
        same = [
            name
            for name, array in arrays.items()
            if array.shape == expected.shape
            and name.rpartition(".")[2].rpartition("/")[2].lstrip("_") == ending
            and np.array_equal(_number(array), expected)
        ]
        if not same:
            raise DifferenceError(f"no array of the result is {key.removeprefix('weight:')}")


def _number(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind == "V":
        import ml_dtypes

        array = array.view(ml_dtypes.bfloat16)
    return array.astype(np.float32)


def _onnx(case: Case, path: str, reference: dict[str, np.ndarray]) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (start, *_rest) = session.get_inputs()
    outputs = session.run(None, {start.name: nets.inputs(case.net, 1)})[0]
    scale = 1 if case.net == "gaussian" else 2
    compare_outputs(outputs, np.clip(scale * reference["outputs"], -2, 2))
