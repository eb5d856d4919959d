"""Loads what a conversion wrote as a TensorFlow or Keras user does, and compares it with the source."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from tests.everyday import keras_nets as nets
from tests.everyday.cases import NAMES, Case
from tests.everyday.verdicts import LoadingError, by_name, compare_outputs, compare_steps

keras = nets.keras
_FEW = 3  # layers whose orders are all tried
_MOMENTUM = "saver_momentum"  # its optimizer is tf.compat.v1.train.MomentumOptimizer
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


def _checkpoint(case: Case, path: str, reference: dict[str, np.ndarray], lines: str) -> None:
    if case.several:
        # A program that has one of the networks, as the comment says.
        lines = lines.replace(".assert_consumed()", ".assert_existing_objects_matched()")
    paths = _objects(path)
    reasons = []
    for where, net, children in _candidates(case, paths):
        objects: dict[str, Any] = {}
        for name, child in children.items():
            objects[f"{where}/{name.replace('.', '/')}".strip("/")] = child
        tool = None
        if "continued" in reference:
            counts = {"_iterations", "iterations", "iter"}
            counters = [(p, None) for p, node in paths.items() if counts & set(node)]
            powers = [(p, None) for p, node in paths.items() if "beta1_power" in node]
            if counters:
                tool = _tool(case)
                tool.build(net.trainable_variables)
                objects[by_name(counters, where)[0][0]] = tool
            elif powers and case.optimizer == "adam_v1":
                tool = tf.compat.v1.train.AdamOptimizer(1e-2)
                objects[powers[0][0]] = tool
            elif case.name == _MOMENTUM:
                tool = tf.compat.v1.train.MomentumOptimizer(1e-3, 0.9)
                objects["optimizer"] = tool
        try:
            _execute(lines, _program(objects, lines, several=case.several))
        except Exception as error:  # noqa: BLE001  # TensorFlow raises whatever it meets
            reasons.append(" ".join(str(error).split())[:300])
            continue
        _compare(case, net, tool, reference)
        return
    raise LoadingError(f"restore: {'; '.join(reasons[:1]) or f'no {case.layers[0]} in the file'}")


def _objects(path: str) -> dict[str, dict[str, int]]:
    """Return the children of every object in a checkpoint, by all of its paths that repeat no object."""
    graph = trackable_object_graph_pb2.TrackableObjectGraph()
    graph.ParseFromString(tf.train.load_checkpoint(path).get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH"))
    found: dict[str, dict[str, int]] = {}
    waiting: list[tuple[str, int, tuple[int, ...]]] = [("", 0, (0,))]
    while waiting and len(found) < 5000:
        where, index, before = waiting.pop(0)
        found[where] = {child.local_name: child.node_id for child in graph.nodes[index].children}
        for name, child in found[where].items():
            if child not in before:
                waiting.append((f"{where}/{name}".strip("/"), child, (*before, child)))
    return found


def _candidates(case: Case, paths: dict[str, dict[str, int]]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield where a model could be attached, the model, and its children by name."""
    first = case.layers[0].replace(".", "/")
    parents = [p.removesuffix(first).rstrip("/") for p in paths if f"/{p}".endswith(f"/{first}")]
    wrapped = {p for p in parents if case.side == "torch" and {"module", "_orig_mod"} & set(p.split("/"))}
    parents = [p for p in parents if p not in wrapped]
    for where in sorted(parents, key=lambda p: any(word in p.lower() for word in ELSEWHERE)):
        if case.name in {"tf_module", _MOMENTUM} or case.optimizer == "adam_v1":
            # Optimizers of TensorFlow 1 take no variables of Keras 3.
            from tests.everyday.tensorflow_files import Module

            net = Module(("w", "b") if case.name == "tf_module" else ("kernel", "bias"))
        else:
            net = nets.build(case.net, _plain(case), _epsilon(case), case.dtype)
        names = zip(case.layers, _plain(case), strict=True)
        yield where, net, {theirs: getattr(net, own) for theirs, own in names if hasattr(net, own)}
    for marker in ("_functional", "layer_with_weights-0"):
        for where in [p for p, node in paths.items() if marker in node]:
            net = nets.sequential(case.net, _epsilon(case))
            yield where, net, {"": net}
    # The names that `inspect` shows, in their order: a program of one's own can have them.
    for where, node in paths.items():
        if case.side == "torch" and {"module", "_orig_mod"} & set(where.split("/")):
            continue
        of_layers = {"kernel", "_kernel", "gamma", "cell", "embeddings", "_embeddings"}
        names = [n for n in node if of_layers & set(paths.get(f"{where}/{n}".strip("/"), ()))]
        if len(names) == len(case.layers) and all(n.isidentifier() and n[0] != "_" for n in names):
            # A file of Keras may list attributes by name: shapes say which layer is which.
            for order in itertools.permutations(names) if len(names) <= _FEW else [tuple(names)]:
                net = nets.build(case.net, order, _epsilon(case), case.dtype)
                yield where, net, {name: getattr(net, name) for name in order}


def _plain(case: Case) -> tuple[str, ...]:
    """Return names that attributes can have."""
    return case.layers if all(n.isidentifier() for n in case.layers) else NAMES[case.net]


def _program(objects: dict[str, Any], lines: str, *, several: bool) -> dict[str, Any]:
    """Return the names of a program that has these objects at these paths, by the printed lines.

    Of `several` networks those that the case does not have hold nothing.
    """
    top: dict[str, Any] = {}
    root = objects.pop("", None)
    for path, value in objects.items():
        first, _, rest = path.partition("/")
        if root is not None and path == "optimizer":
            root.compile(value)
        if not rest:
            top[first] = value
            continue
        holder = top.setdefault(first, tf.Module())
        *middle, last = rest.split("/")
        for step in middle:
            if not hasattr(holder, step):
                setattr(holder, step, tf.Module())
            holder = getattr(holder, step)
        setattr(holder, last, value)
    for name, value in re.findall(r"\b(\w+)=(\w+)\b", lines):
        if several or name in top:
            top[value] = top.get(name, tf.Module())
    for name in re.findall(r"\b(\w+)=\[optimizer\]", lines):
        top["optimizer"] = getattr(top.get(name), "0", tf.Module())
    if root is None and "model" not in top:
        root = tf.Module()
        for name, value in top.items():
            setattr(root, name, value)
    return {"objects": dict(top), **({} if root is None else {"model": root}), **top}


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
            top: [tuple(each.shape) for each in file[top]["vars"].values()]
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
        found = [(g.partition("/")[0], None) for g in groups if "opt" in g.partition("/")[0]]
        if not found:
            raise LoadingError("the result has no optimizer")
        setattr(agent, by_name(found, chosen[0])[0][0], tool)
    agent.built = True
    try:
        _execute(lines, {"model": agent})
    except Exception as error:  # Keras raises whatever it meets
        raise LoadingError(f"load_weights: {' '.join(str(error).split())[:200]}") from error
    _compare(case, net, tool, reference)
