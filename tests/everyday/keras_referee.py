"""Loads what a conversion wrote as a TensorFlow or Keras user does, and compares it with the source."""

from __future__ import annotations

import shutil
from typing import Any

import h5py
import numpy as np
import tensorflow as tf

from tests.everyday import keras_nets as nets
from tests.everyday import keras_programs
from tests.everyday.cases import NAMES, Case
from tests.everyday.verdicts import LoadingError, by_name, compare_outputs, compare_steps

keras = nets.keras
ELSEWHERE = ("target", "ema", "critic", "qf", "average")


def judge(case: Case, column: str, path: str, reference: dict[str, np.ndarray], lines: str) -> None:
    """Raise LoadingError or DifferenceError unless the result at the path is what the source was.

    It is loaded by the `lines` that the conversion printed.
    """
    if not lines:
        raise LoadingError("no line that loads it was printed")
    {"tf": _checkpoint, "keras": _weights}[column](case, path, reference, lines)


def _execute(lines: str, names: dict[str, Any]) -> None:
    exec(compile(lines, "<load>", "exec"), {"tf": tf, "keras": keras, "shutil": shutil, **names})


def _epsilon(case: Case) -> float:
    return 1e-5 if case.side == "torch" else 1e-3


def _tool(case: Case) -> Any:
    """Return a user's optimizer, made as the notes of the conversion say."""
    assert case.optimizer
    if case.name == "schedule":
        return keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(1e-2, 1000, 0.9))
    return nets.optimizer(
        case.optimizer, 1e-8 if case.side == "torch" or case.optimizer == "adam_v1" else 1e-7
    )


def _compare(case: Case, net: Any, tool: Any, reference: dict[str, np.ndarray]) -> None:
    if case.dtype != "float32":
        wide = nets.build(case.net, case.layers)
        for variable, narrow in zip(wide.weights, net.weights, strict=True):
            variable.assign(tf.cast(tf.convert_to_tensor(narrow), tf.float32))
        net = wide
    compare_outputs(nets.outputs(net, case.net), reference["outputs"])
    if "continued" in reference:
        if tool is None:
            raise LoadingError("the result has no optimizer")
        if case.rate_elsewhere and hasattr(tool, "learning_rate") and case.name != "schedule":
            tool.learning_rate = _tool(case).learning_rate
        if not case.differs:
            compare_steps(nets.continued(net, case.net, tool), reference)


# --- tf.train.Checkpoint --------------------------------------------------------------------------------


def _checkpoint(case: Case, _: str, reference: dict[str, np.ndarray], lines: str) -> None:
    """Restore into the program of the case, which is written by hand."""
    if case.several:
        # A program that has one of the networks, as the comment says.
        lines = lines.replace(".assert_consumed()", ".assert_existing_objects_matched()")
    continued = "continued" in reference
    program = keras_programs.program(case, _epsilon(case), (lambda: _tool(case)) if continued else None)
    try:
        _execute(lines, program.names)
    except Exception as error:  # TensorFlow raises whatever it meets
        raise LoadingError(f"restore: {' '.join(str(error).split())[:300]}") from error
    _compare(case, program.net, program.tool, reference)


def _plain(case: Case) -> tuple[str, ...]:
    """Return names that attributes can have."""
    return case.layers if all(n.isidentifier() for n in case.layers) else NAMES[case.net]


# --- .weights.h5 ----------------------------------------------------------------------------------------


def _weights(case: Case, path: str, reference: dict[str, np.ndarray], lines: str) -> None:
    """Load into a subclassed model with the layers' names, or into a Sequential model of the same layers."""
    models = [lambda: nets.build(case.net, _plain(case), _epsilon(case), case.dtype)]
    if case.net in {"mlp", "gaussian", "cnn"}:
        models.append(lambda: nets.sequential(case.net, _epsilon(case)))
    if case.several:
        _wrapped(case, path, reference, lines)
        return
    reasons = []
    for make in models:
        net, tool = make(), None
        if "continued" in reference:
            tool = _tool(case)
            net.compile(tool, "mse")
            tool.build(net.trainable_variables)
        try:
            _execute(lines, {"model": net})
        except Exception as error:  # noqa: BLE001  # Keras raises whatever it meets
            reasons.append(" ".join(str(error).split())[:200])
            continue
        if tool is not None and case.optimizer != "sgd_plain" and not _is_filled(tool):
            tool = None
        _compare(case, net, tool, reference)
        return
    raise LoadingError(f"load_weights: {reasons[0]}")


def _is_filled(tool: Any) -> bool:
    """Return whether an optimizer has made updates: SGD of PyTorch does not count them."""
    return any(np.any(np.asarray(v)) for v in tool.variables if "learning_rate" not in v.path)


class Wrapper(keras.Model):  # type: ignore[misc]
    """A user's agent: networks and their optimizers as attributes."""


class Part(keras.layers.Layer):  # type: ignore[misc]
    """A part of a user's agent."""


def _nested(case: Case, lines: str) -> Any:
    """Return an actor whose layers stand in `Sequential` models and beside them: `latent_pi.0`, `mu`."""
    make = Part if "keras.layers.Layer" in lines else Wrapper
    holder, order = make(), []
    parts: dict[str, list[Any]] = {}
    for name, layer in zip(case.layers, nets.layers(case.net, _epsilon(case)), strict=True):
        parent, _, last = name.rpartition(".")
        parts.setdefault(parent or last, []).append(layer)
    for name, layers in parts.items():
        alone = name in case.layers
        order.append(layers[0] if alone else keras.Sequential(layers))
        *above, last = name.split(".")
        owner = holder
        for step in above:
            setattr(owner, step, make())
            owner = getattr(owner, step)
            owner.built = True
        setattr(owner, last, order[-1])

    def net(x: Any) -> Any:
        for part in order:
            x = part(x)
        return x

    net(tf.constant(nets.inputs(case.net, 0)))
    holder.built = True
    net.holder = holder  # type: ignore[attr-defined]
    return net


def _wrapped(case: Case, path: str, reference: dict[str, np.ndarray], lines: str) -> None:
    """Load the first of several networks as an attribute of a user's agent, and its optimizer too."""
    with h5py.File(path) as file:
        groups: list[str] = []
        file.visit(groups.append)
        own = [tuple(file["vars"][name].shape) for name in file["vars"]] if "vars" in file else []
        # Those of a network, such as the logarithm of PPO's standard deviation.
        beside = {
            top: [tuple(variable.shape) for variable in file[top]["vars"].values()]
            for top in file
            if "vars" in file[top]
        }
    first = case.layers[0].replace(".", "/")
    tops = [g.partition("/")[0] for g in groups if f"/{g}".endswith(f"/{first}") and g.count("/")]
    tops += [g.partition("/")[0] for g in groups if "/layers/" in g]
    chosen = [t for t in dict.fromkeys(tops) if not any(word in t.lower() for word in ELSEWHERE)]
    if not chosen:
        raise LoadingError("load_weights: no group of the network")
    agent, tool = Wrapper(), None
    # The agent's own variables, such as the logarithm of SAC's entropy coefficient.
    for shape in own:
        agent.add_weight(shape=shape)
    net: Any
    if "." in case.layers[0]:
        net = _nested(case, lines)
        for shape in beside.get(chosen[0], ()):
            net.holder.add_weight(shape=shape)
        setattr(agent, chosen[0], net.holder)
    else:
        net = nets.build(case.net, _plain(case), _epsilon(case), case.dtype)
        setattr(agent, chosen[0], net)
    if "continued" in reference:
        tool = _tool(case)
        tool.build(net.trainable_variables)
        dicts = [(g.partition("/")[0], None) for g in groups if "opt" in g.partition("/")[0]]
        if not dicts:
            raise LoadingError("the result has no optimizer")
        setattr(agent, by_name(dicts, chosen[0])[0][0], tool)
    agent.built = True
    try:
        _execute(lines, {"model": agent})
    except Exception as error:  # Keras raises whatever it meets
        raise LoadingError(f"load_weights: {' '.join(str(error).split())[:200]}") from error
    _compare(case, net, tool, reference)
