"""Loads what a conversion wrote as a TensorFlow or Keras user does, and compares what it computes with the source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tests.everyday import keras_nets as nets
from tests.everyday.cases import Case
from tests.everyday.verdicts import Unloadable, by_name, compare_outputs, compare_steps

keras = nets.keras
ELSEWHERE = ("target", "ema", "critic", "qf", "average")


def judge(case: Case, column: str, path: str, reference: dict[str, np.ndarray]) -> None:
    """Raise Unloadable or Wrong unless the result at the path is what the source was."""
    {"tf": _checkpoint, "keras": _weights}[column](case, path, reference)


def _epsilon(case: Case) -> float:
    return 1e-5 if case.side == "torch" else 1e-3


def _tool(case: Case) -> Any:
    """Return a user's optimizer, made as the notes of the conversion say."""
    assert case.optimizer
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
            raise Unloadable("the result has no optimizer")
        compare_steps(nets.continued(net, case.net, tool), reference)


# --- tf.train.Checkpoint --------------------------------------------------------------------------------


def _checkpoint(case: Case, path: str, reference: dict[str, np.ndarray]) -> None:
    keys = [k.split("/.ATTRIBUTES")[0] for k, _ in tf.train.list_variables(path) if "/.ATTRIBUTES" in k]
    reasons = []
    for where, net, children in _candidates(case, keys):
        objects: dict[str, Any] = {}
        for name, child in children.items():
            _put(objects, f"{where}/{name}".strip("/"), child)
        tool = None
        if "continued" in reference:
            tool = _tool(case)
            tool.build(net.trainable_variables)
            counters = [(k.rpartition("/")[0], None) for k in keys if k.endswith("iterations")]
            counters += [(k.rpartition("/")[0], None) for k in keys if k.endswith("/iter")]
            if not counters:
                tool = None
            else:
                _put(objects, by_name(counters, where)[0][0], tool)
        try:
            root = _root(objects)
            # `restore` counts saves, which files of `write` and `save_weights` do not.
            status = root.restore(path) if "save_counter" in keys else root.read(path)
            status.assert_existing_objects_matched()
        except (AssertionError, ValueError, tf.errors.OpError) as error:
            reasons.append(" ".join(str(error).split())[:300])
            continue
        _compare(case, net, tool, reference)
        return
    raise Unloadable(f"restore: {'; '.join(reasons[:1]) or f'no {case.layers[0]} in the file'}")


def _candidates(case: Case, keys: list[str]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield where a model could be attached, the model, and its children by name."""
    first = case.layers[0]
    parents = []
    for key in keys:
        steps = key.split("/")
        if first in steps:
            parents.append("/".join(steps[: steps.index(first)]))
    for where in sorted(dict.fromkeys(parents), key=lambda p: any(word in p.lower() for word in ELSEWHERE)):
        if case.name in {"tf_module"}:
            from tests.everyday.tensorflow_files import Module

            net = Module()
            yield where, net, {name: getattr(net, name) for name in case.layers}
        net = nets.build(case.net, case.layers, _epsilon(case), case.dtype)
        yield where, net, {n: getattr(net, n) for n in case.layers if hasattr(net, n)}
    for marker in ("_functional", "layer_with_weights-0"):
        for where in dict.fromkeys(k.partition(marker)[0].rstrip("/") for k in keys if marker in k):
            net = nets.sequential(case.net, _epsilon(case))
            yield where, net, {"": net}


def _put(objects: dict[str, Any], path: str, value: Any) -> None:
    objects[path] = value


def _root(objects: dict[str, Any]) -> Any:
    """Return the checkpoint of a program that has these objects at these paths."""
    if set(objects) == {""}:
        return tf.train.Checkpoint(objects[""])
    top: dict[str, Any] = {}
    root = objects.pop("", None)
    for path, value in objects.items():
        first, _, rest = path.partition("/")
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
    return tf.train.Checkpoint(root, **top) if root is not None else tf.train.Checkpoint(**top)


# --- .weights.h5 ----------------------------------------------------------------------------------------


def _weights(case: Case, path: str, reference: dict[str, np.ndarray]) -> None:
    """Load into a subclassed model with the layers' names, or into a Sequential model of the same layers."""
    models = [lambda: nets.build(case.net, case.layers, _epsilon(case), case.dtype)]
    if case.net in {"mlp", "gaussian", "cnn"}:
        models.append(lambda: nets.sequential(case.net, _epsilon(case)))
    reasons = []
    for make in models:
        net, tool = make(), None
        if "continued" in reference:
            tool = _tool(case)
            net.compile(tool, "mse")
            tool.build(net.trainable_variables)
        try:
            net.load_weights(path)
        except Exception as error:  # noqa: BLE001  # Keras raises whatever it meets
            reasons.append(" ".join(str(error).split())[:200])
            continue
        if tool is not None and not int(tool.iterations):
            tool = None
        _compare(case, net, tool, reference)
        return
    raise Unloadable(f"load_weights: {reasons[0]}")
