"""Python lines that load the output of a conversion, built from the written tree."""

from __future__ import annotations

import itertools
import keyword
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ckpttool.conversion.targets import TARGETS, TargetKind
from ckpttool.core import deferred
from ckpttool.core.tree import Leaf, Path, Tree, key
from ckpttool.mapping.keras_names import SEQUENTIAL_EDGES

_MOST, _WIDTH = 8, 80
_GROUPS = "param_groups"
_ENDINGS = ("_state_dict", "_state", ".state_dict")
_WHOLE = frozenset(("state_dict", "model", "module", "net", "network", "params", "weights", "policy_dict"))
_WEIGHTS = ".weights.h5"
_TRAINED = ("parameter", "buffer")
# tf.train.Checkpoint creates this variable itself.
_SAVES = "save_counter"
# Edges between a Keras model and its layers (keras/src/models, tf_keras): the object above them is a model.
_EDGE = deferred.compile(r"_functional|_layers|_operations|layers|layer_with_weights-\d+|layer-\d+")
_COUNTS = frozenset(("_iterations", "iterations", "iter"))
_MOST_NAMED = 4  # objects that are arguments of tf.train.Checkpoint


def format_loading_code(
    target: str, kind: TargetKind, tree: Tree, *, foreign: bool = False, root: bool = False
) -> tuple[str, ...]:
    """Return at most eight lines that load the target, none for targets in an RL library's own format.

    Args:
        target: the file or TensorFlow prefix that was written.
        kind: its format and layout.
        tree: what was written to it.
        foreign: names come from another framework and may start with objects that no PyTorch model has.
        root: the source is one model's state_dict.
    """
    if kind.format == "pytorch_dcp":
        load = f"torch.distributed.checkpoint.load(state, checkpoint_id={python_literal(target)})"
        tops = dict.fromkeys(str(path[0].value) for path in tree if path)
        return (load, _format_names("# entries of state: ", tops))
    kind = kind._replace(sharded=None)  # a format's shards are loaded as its only file is
    if kind == TARGETS["torch"]:
        return _torch(target, tree, foreign=foreign)
    if kind == TARGETS["tf"]:
        return _objects(target, tree, root=root)
    if kind == TARGETS["tf1"]:
        return (f"tf.compat.v1.train.Saver().restore(session, {python_literal(target)})",)
    if kind == TARGETS["keras"]:
        return _keras(target, tree, str(kind.options.get("root", "")))
    return ()


def python_literal(value: object) -> str:
    """Return a string or number as a Python literal, double-quoted unless it needs escapes."""
    if not isinstance(value, str):
        return repr(value)
    plain = value.isprintable() and '"' not in value and "\\" not in value
    return f'"{value}"' if plain else ascii(value)


def _torch(target: str, tree: Tree, *, foreign: bool) -> tuple[str, ...]:
    states, optimizers, partial_states = _find_state_dicts(tree)
    source = f"torch.load({python_literal(target)}, weights_only=True)"
    if not states:
        return (f"tensors = {source}",)

    def load(name: str, at: Path, state: str) -> str:
        return f"{name}.load_state_dict({state}{', strict=False' if at in partial_states else ''})"

    if len(states) == 1 and not optimizers:
        (at,) = states
        items = f"{source}{_items(at)}"
        paths = (path for path, leaf in tree.tensors() if path[:-1] == at and leaf.role in _TRAINED)
        modules = list(dict.fromkeys(str(path[-1].value).rpartition(".")[0] for path in paths))
        above = _shared_prefixes(modules) if foreign else ""
        about = _format_names("# modules of model: ", (name.removeprefix(above) for name in modules))
        if not above:
            return (load(_variable_name(at), at, items), *((about,) if foreign else ()))
        shorter = f"{{k.removeprefix({python_literal(above)}): v for k, v in state.items()}}"
        load_state = load(_variable_name(at), at, "state")
        return (f"state = {items}", f"state = {shorter}", load_state, about)
    names = _variable_names((*states, *optimizers))
    shown = list(names)[: _MOST - 1 if len(names) < _MOST else _MOST - 2]
    lines = [load(names[at], at, f"checkpoint{_items(at)}") for at in shown]
    rest = list(names.values())[len(shown) :]
    return (f"checkpoint = {source}", *lines, *([_format_names("# likewise ", rest)] if rest else ()))


def _shared_prefixes(modules: list[str]) -> str:
    """Return the objects above all modules, with a trailing dot: `model.` for model.fc1, model.fc2."""
    columns = zip(*(name.split(".")[:-1] for name in modules), strict=False)
    return "".join(f"{names[0]}." for names in itertools.takewhile(lambda name: len({*name}) == 1, columns))


def _find_state_dicts(tree: Tree) -> tuple[list[Path], list[Path], set[Path]]:
    """Return where the written dict contains state_dicts of modules and of optimizers.

    The last result are the dicts of modules that also contain entries which no module loads.
    """
    steps = {path: [step.value for step in path] for path in tree}
    optimizers = dict.fromkeys(
        path[: names.index(_GROUPS)] for path, names in steps.items() if _GROUPS in names
    )
    states = dict.fromkeys(
        path[:-1]
        for path, leaf in tree.tensors()
        if leaf.role in _TRAINED and path and isinstance(path[-1].value, str) and "." in path[-1].value
    )
    inside = [at for at in states if optimizers.keys().isdisjoint(at[:n] for n in range(len(at) + 1))]
    extended = {
        path[:depth] for path, leaf in tree.items() for depth in range(len(path) - isinstance(leaf, Leaf))
    }
    return inside, list(optimizers), extended.difference(optimizers)


def _items(at: Path) -> str:
    return "".join(f"[{python_literal(step.value)}]" for step in at)


def _variable_names(places: Collection[Path]) -> dict[Path, str]:
    """Return a unique variable name for each place: longer names or numbers where several would be equal."""
    names = {at: _variable_name(at) for at in places}
    wholes = {
        at: "_".join(re.sub(r"\W", "_", str(step.value), flags=re.ASCII) for step in at) for at in places
    }
    longer, several = Counter(wholes.values()), Counter(names.values())
    for number, (at, name) in enumerate(names.items()):
        if several[name] > 1:
            whole = wholes[at]
            names[at] = whole if longer[whole] == 1 and whole.isidentifier() else f"{name}_{number}"
    return names


def _variable_name(at: Path) -> str:
    """Return a variable name for a path: `actor` for checkpoint["actor_state_dict"]."""
    for step in reversed(at):
        name = str(step.value).replace("-", "_").replace(".", "_")
        for ending in _ENDINGS:
            name = name.removesuffix(ending)
        if name in _WHOLE:
            return "model"
        if is_word(name) and name.isascii():
            return name
    return "model"


def _objects(target: str, tree: Tree, *, root: bool) -> tuple[str, ...]:
    """Return how `tf.train.Checkpoint` restores the objects: one at the root, or several by name."""
    from ckpttool.formats.tf_object_graph import MARK

    weights = [path for path, leaf in tree.tensors() if leaf.role in _TRAINED]
    tops = list(dict.fromkeys(str(path[0].value) for path in weights))
    objects = dict.fromkeys((*tops, *(str(top[0].value) for top in _keras_optimizers(tree))))
    names = dict.fromkeys(str(path[0].value) for path in tree)
    inside = {str(path[0].value) for path in tree if len(path) > 1}
    every = [name for name in objects if name in inside]
    others = [name for name in names if name not in objects and name != _SAVES]
    others += [name for name in objects if name not in inside]
    root = root or _is_model(weights)
    if root:
        others = [name for name in others if name not in {*tops}]
    # A file of `write` or `save_weights` has no save count, which `restore` expects.
    kept = any(MARK in leaf.key for _, leaf in tree.tensors())
    read = "read" if kept and _SAVES not in names else "restore"
    # `assert_consumed` would also need a variable for every counter.
    check = "assert_existing_objects_matched" if others else "assert_consumed"
    restore = f".{read}({python_literal(target)}).{check}()"
    if root:
        inner = [top for top in tops if not _EDGE.fullmatch(top)]
        lines = [f"tf.train.Checkpoint(model){restore}"]
        lines += [_format_names("# attributes of model: ", inner)] * bool(inner)
        lines += _other_content_lines(others)
        return (*lines, *_container_lines(tree, {}, _MOST - len(lines)))
    if not every:
        return (f"reader = tf.train.load_checkpoint({python_literal(target)})",)
    short = {name: _variable_name((key(name),)) for name in every}
    named = short if len({*short.values()}) == len(short) else {name: name for name in every}
    if all(map(is_word, every)) and len(every) <= _MOST_NAMED:
        values = ", ".join(
            f"{name}={_object_expression(name, variable, tree)}" for name, variable in named.items()
        )
        lines = [f"tf.train.Checkpoint({values}){restore}"]
    else:
        named = dict(zip(every, every, strict=True))
        lines = [_format_names("# objects is a dict of ", [python_literal(name) for name in every])]
        lines.append(f"tf.train.Checkpoint(**objects){restore}")
    for name in [name for name in every if name in tops][:_MOST_NAMED]:
        below = dict.fromkeys(str(path[1].value) for path in weights if str(path[0].value) == name)
        inner = [step for step in below if not _EDGE.fullmatch(step)]
        if inner:
            lines.append(_format_names(f"# attributes of {named[name]}: ", inner))
    lines += _other_content_lines(others) or [
        "# for a subset of the objects: .assert_existing_objects_matched()"
    ]
    lines = lines[:_MOST]
    return (*lines, *_container_lines(tree, named, _MOST - len(lines)))


_Objects = dict[str, Any]
_ARGUMENTS = "# add the activations, Dense(8, activation=...): the file has none"
_LISTS = "# lists of a tf.Module (a keras.Model saves none): "


def _container_lines(tree: Tree, named: Mapping[str, str], room: int) -> list[str]:
    """Return the code of the Sequentials in a tree, and the names of its lists, in at most `room` lines.

    `named` are the variables of the objects at the top; without them the root is `model`.
    """
    root: _Objects = {}
    for path, leaf in tree.tensors():
        if leaf.role in _TRAINED:
            node = root
            for step in path[:-1]:
                node = node.setdefault(str(step.value), {})
            node[str(path[-1].value).removeprefix("_")] = leaf
    owners: dict[str, list[str]] = {}
    lists: list[str] = []
    tops: dict[str, object] = {"model": root}
    if named:
        tops = {named.get(name, name): content for name, content in root.items()}
    waiting = [*tops.items()]
    waiting.reverse()
    while waiting:
        name, content = waiting.pop()
        if not isinstance(content, dict):
            continue
        if layers := _numbered_layers(content):
            owners.setdefault(_sequential_code(layers), []).append(name)
        elif content and all(step.isdecimal() for step in content):
            lists.append(name)
        inner = [(f"{name}.{step}", child) for step, child in content.items() if not _EDGE.fullmatch(step)]
        waiting += reversed(inner)
    lines = [line for code, names in owners.items() for line in _wrap_code(f"# {', '.join(names)}: ", code)]
    lines += [_ARGUMENTS] * bool(owners)
    lines += [_format_names(_LISTS, lists)] * bool(lists)
    if len(lines) > room:
        lines = [*lines[: max(room - 1, 0)], "# ..."][:room]
    return lines


def _numbered_layers(node: _Objects) -> dict[int, _Objects]:
    """Return the layers of a Sequential by their numbers, none if the object is not one."""
    inner, edge = SEQUENTIAL_EDGES
    children = node.get(inner, {})
    layers = children.get(edge, {}) if isinstance(children, dict) else {}
    return {int(number): layer for number, layer in layers.items() if number.isdecimal()}


def _sequential_code(layers: Mapping[int, _Objects]) -> str:
    """Return the call that makes a Sequential; `...` is a layer that the file does not determine."""
    first, shape = layers.get(1, {}), "..."
    cell = first.get("cell")
    kernel = (cell if isinstance(cell, dict) else first).get("kernel")
    if isinstance(kernel, Leaf):
        shape = repr((*(None,) * (1 if cell else len(kernel.shape) - 2), kernel.shape[-2]))
    elif "embeddings" in first:
        shape = "(None,)"
    code = [_layer_code(layers[n]) if n in layers else "..." for n in range(1, max(layers) + 1)]
    return f"keras.Sequential([{', '.join([f'keras.Input({shape})', *code])}])"


def _layer_code(layer: _Objects) -> str:
    """Return the call that makes a layer of these variables."""
    if inner := _numbered_layers(layer):
        return _sequential_code(inner)
    members = {name: leaf for name, leaf in layer.items() if isinstance(leaf, Leaf)}
    cell = layer.get("cell", {})
    if layer.keys() - members.keys() - {"cell"} or not isinstance(cell, dict):
        return "..."
    from ckpttool.formats import keras_h5  # for layers of a keras.Sequential

    name = keras_h5.layer_class(members, cell)
    shapes = {name: leaf.shape for name, leaf in (members or cell).items()}
    bare = "" if "bias" in shapes else ", use_bias=False"
    if name == "dense":
        return f"Dense({shapes['kernel'][-1]}{bare})"
    if name in ("conv1d", "conv2d", "conv3d"):
        *size, _, filters = shapes["kernel"]
        form = size[0] if len({*size}) == 1 else tuple(size)
        return f"{name.replace('conv', 'Conv').replace('d', 'D')}({filters}, {form}{bare})"
    if name in ("lstm", "gru"):
        return f"{name.upper()}({shapes['recurrent_kernel'][0]}{bare})"
    if name == "embedding":
        return f"Embedding({', '.join(map(str, shapes['embeddings']))})"
    if name in ("batch_normalization", "layer_normalization"):
        absent = [word for word, own in (("center", "beta"), ("scale", "gamma")) if own not in shapes]
        return f"{name.split('_')[0].title()}Normalization({', '.join(f'{word}=False' for word in absent)})"
    return "..."


def _wrap_code(before: str, code: str) -> list[str]:
    """Return code in comment lines, broken between the layers."""
    lines = [before]
    for piece in re.split(r"(?<=, )(?=[A-Z.])", code):
        if len(lines[-1]) + len(piece.rstrip()) > _WIDTH - 6 and lines[-1] != before:
            lines.append("#     ")
        lines[-1] += piece
    return [line.rstrip() for line in lines]


def _other_content_lines(others: Collection[str]) -> list[str]:
    return [_format_names("# the file also contains ", others)] if others else []


def _is_model(weights: Iterable[Path]) -> bool:
    """Whether the root is a model with layers as attributes, not a dict of objects."""
    deepest: dict[str, int] = {}
    for path in weights:
        top = str(path[0].value)
        deepest[top] = max(deepest.get(top, 0), len(path))
    if any(map(_EDGE.fullmatch, deepest)):
        return True
    # Variables of the root itself occur beside objects and beside layers.
    modules = [depth for depth in deepest.values() if depth > 1]
    return bool(deepest) and (not modules or (len(modules) > 1 and min(modules) == 2))


def _keras_optimizers(tree: Tree) -> list[Path]:
    """Return where optimizers are: above an update count, or at the top with only slots.

    A count at the root is a number of the program (`iter`), because the root holds the objects.
    """
    counted = dict.fromkeys(path[:-1] for path in tree if len(path) > 1 and str(path[-1].value) in _COUNTS)
    with_slots = (path[:1] for path, leaf in tree.tensors() if leaf.role == "slot")
    return [*counted, *(top for top in dict.fromkeys(with_slots) if all(at[:1] != top for at in counted))]


def _object_expression(name: str, variable: str, tree: Tree) -> str:
    """Return the expression for an object: a list if the file numbers optimizers."""
    numbers = [top[1].value for top in _keras_optimizers(tree) if str(top[0].value) == name and len(top) == 2]
    if not numbers or not all(str(number).isdecimal() for number in numbers):
        return variable
    if len(numbers) == 1:
        return "[optimizer]"
    return f"[{', '.join(f'optimizer_{number}' for number in range(len(numbers)))}]"


def is_word(name: str) -> bool:
    """Return whether a name can be a variable."""
    return name.isidentifier() and not keyword.iskeyword(name)


def _keras(target: str, tree: Tree, root: str) -> tuple[str, ...]:
    load = target if target.endswith(_WEIGHTS) else f"{os.path.splitext(target)[0]}{_WEIGHTS}"
    # Keras requires this suffix.
    copied = () if load == target else (f"shutil.copyfile({python_literal(target)}, {python_literal(load)})",)
    paths = [path for path, leaf in tree.tensors() if leaf.role in _TRAINED]
    cut = int(bool(root) and all(str(path[0].value) == root and len(path) > 2 for path in paths))
    tops = dict.fromkeys(str(path[cut].value) for path in paths)
    about = [_format_names("# attributes of model: ", tops)]
    if all(top.isdigit() or _EDGE.fullmatch(top) for top in tops):
        about = ["# model: a Sequential or functional model of the same layers"]
    elif any(len(path) - cut > 3 and not _EDGE.fullmatch(str(path[cut].value)) for path in paths):
        # Keras first searches a model's contents below `layers`, and does not support models inside models.
        about.append("# objects between the model and its layers must be keras.layers.Layer, not keras.Model")
    return (*copied, f"model.load_weights({python_literal(load)})", *about)


def _format_names(before: str, names: Iterable[str]) -> str:
    """Return names in one line, cut after the last that fits; no more are read than fit."""
    end = ", ..."
    shown: list[str] = []
    width, cut = len(before), 1
    for name in names:
        shown.append(name if name.isprintable() else ascii(name))
        width += len(shown[-1]) + (2 if len(shown) > 1 else 0)
        if width > _WIDTH and len(shown) > 1:
            return f"{before}{', '.join(shown[:cut])}{end}"
        cut = len(shown) if width + len(end) <= _WIDTH else max(cut, 1)
    return before + ", ".join(shown)
