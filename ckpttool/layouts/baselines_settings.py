"""What the settings of a Stable-Baselines agent (2 or 3) say of its spaces and its activations.

Sources: gymnasium/spaces/box.py and gym/spaces/box.py (`low`, `high`); stable_baselines3/common/save_util.py
and stable_baselines/common/save_util.py (`data_to_json`: attributes as text beside the pickle);
stable_baselines3/common/preprocessing.py (`is_image_space`, `preprocess_obs`).
"""

from __future__ import annotations

import math
import re
from typing import Any

from ckpttool.layouts import activations, small_arrays
from ckpttool.layouts.canonical import Facts
from ckpttool.leaf import Key, Leaf, Path, Record, ValueLeaf, attr, index, key
from ckpttool.ledger import unknown
from ckpttool.tree import Tree

_DATA = attr("data")
_TEXT = re.compile(r"[-+\w.]+")
# By the last part of a class's name; torch.nn's and TensorFlow's.
_ACTIVATIONS = {
    **activations.TORCH,
    "Identity": "linear",
    "relu": "relu",
    "tanh": "tanh",
    "elu": "elu",
    "sigmoid": "sigmoid",
    "softplus": "softplus",
}
_TORCH = "torch.nn.modules."
_IMAGE_AXES = 3
IMAGES = "observations that are images"
"""What stands among a policy's unplaced tensors where nobody says what is done to images."""


def facts(known: Facts, tree: Tree) -> Facts:
    """Return the facts with the bounds of the action space and the activation where the file says them."""
    low, high = (bound(tree, end) for end in ("low", "high"))
    known = known.bounded("data/action_space", low or (), high or ()) or known
    name = activation(tree)
    if name is not None:
        known = known.read("data/policy_kwargs", hidden=name)
    kind = _space(tree, "observation_space")
    if kind.endswith(".Dict"):
        known = known.lacking(unknown("architecture", "how the parts of a Dict observation are joined"))
    return known


def bound(tree: Tree, end: str) -> tuple[float, ...] | None:
    """Return the actions' `low` or `high`; None when the file does not tell it in full, or it is infinite."""
    found = _member(tree, "action_space", end)
    if isinstance(found, Leaf):
        numbers = small_arrays.numbers(found)
    elif isinstance(found, ValueLeaf) and isinstance(found.value, str) and "..." not in found.value:
        numbers = _parsed(found.value)
    else:
        return None
    return numbers if numbers and all(map(math.isfinite, numbers)) else None


def _parsed(text: str) -> tuple[float, ...]:
    """Return the numbers of NumPy's text for an array, such as `[-1. -1.]`; none if it is anything else."""
    try:
        return tuple(float(word) for word in _TEXT.findall(text))
    except ValueError:
        return ()


def activation(tree: Tree) -> str | None:
    """Return the activation that `policy_kwargs` names; a class that nobody knows by its own full name."""
    found = _member(tree, "policy_kwargs", "activation_fn")
    if found is None:
        found = _member(tree, "policy_kwargs", "act_fun")
    if found is None:
        # A program's own function or class: a name that no activation here has.
        return class_of(tree, "policy_kwargs", "activation_fn")
    if not isinstance(found, ValueLeaf) or not isinstance(found.value, Record | str):
        return None
    full = found.value.name if isinstance(found.value, Record) else found.value.strip("<>'").split("'")[-1]
    ours = full.startswith((_TORCH, "tensorflow."))
    return _ACTIVATIONS.get(full.rpartition(".")[2], full) if ours else full


def class_of(tree: Tree, *names: str) -> str | None:
    """Return the full name of a class among the settings, None where there is none; `?` stands for its name.

    cloudpickle writes a program's own class whole: its name is among the arguments of what makes it.
    """
    path = (_DATA, *(key(name) for name in names))
    found = tree.get(path)
    if isinstance(found, ValueLeaf):
        return found.value.name if isinstance(found.value, Record) else None
    below = [each for each in tree if each[: len(path)] == path]
    if not below:
        return None
    module, name = (
        _word(tree, (*path, attr("__module__")), (*path, key("__module__"))),
        _word(tree, (*path, attr("__args__"), index(1))),
    )
    return f"{module or '?'}.{name or '?'}"


def _word(tree: Tree, *paths: Path) -> str | None:
    values = (found.value for path in paths if isinstance(found := tree.get(path), ValueLeaf))
    return next((value for value in values if isinstance(value, str)), None)


def setting(tree: Tree, group: str, name: str, default: Any) -> Any:
    """Return the plain value of one entry of a group of settings."""
    found = _member(tree, group, name)
    return found.value if isinstance(found, ValueLeaf) else default


def is_box(tree: Tree) -> bool:
    """Say whether the actions are numbers with bounds, or nobody says what they are."""
    kind = _space(tree, "action_space")
    return not kind or kind.endswith((".Box", "Box"))


def images(tree: Tree) -> str | None:
    """Return what is done to observations of three axes (images are divided by 255), None for others."""
    steps = [_DATA, key("observation_space"), attr("_shape")]
    axes = sum(path[:3] == tuple(steps) for path in tree)
    return IMAGES if axes == _IMAGE_AXES else None


def _space(tree: Tree, name: str) -> str:
    """Return the class of a space, "" where the file does not say it."""
    container = tree.containers.get((_DATA, key(name)))
    if container is not None and container.kind == "record":
        return container.name or ""
    found = tree.get((_DATA, key(name)))
    if isinstance(found, ValueLeaf) and isinstance(found.value, Record):
        return found.value.name
    return _text(tree, (_DATA, key(name), key(":type:")))


def _text(tree: Tree, path: Path) -> str:
    found = tree.get(path)
    text = found.value if isinstance(found, ValueLeaf) else None
    return text.strip("<>").split("'")[-2] if isinstance(text, str) and text.count("'") > 1 else ""


def _member(tree: Tree, group: str, name: str) -> Leaf | ValueLeaf | None:
    """Return an attribute of an unpickled object, or an entry of what is kept as JSON."""
    steps: tuple[Key, ...] = (attr(name), key(name))
    return next((found for step in steps if (found := tree.get((_DATA, key(group), step))) is not None), None)
