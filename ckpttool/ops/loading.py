"""The Python lines that load what a conversion wrote, made from the tree that was written."""

from __future__ import annotations

import keyword
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable

from ckpttool.formats.object_graph import MARK
from ckpttool.leaf import Leaf, Path, key
from ckpttool.ops.targets import TARGETS, TargetKind
from ckpttool.tree import Tree

_MOST, _WIDTH = 8, 80
_GROUPS = "param_groups"
_ENDINGS = ("_state_dict", "_state", ".state_dict")
_WHOLE = frozenset(("state_dict", "model", "module", "net", "network", "params", "weights", "policy_dict"))
_WEIGHTS = ".weights.h5"
_TRAINED = ("parameter", "buffer")
# tf.train.Checkpoint makes this variable itself.
_SAVES = "save_counter"
# Edges between a Keras model and its layers (keras/src/models, tf_keras): above them stands a model.
_EDGE = re.compile(r"_functional|_layers|_operations|layers|layer_with_weights-\d+|layer-\d+")
_COUNTS = frozenset(("_iterations", "iterations", "iter"))
_MOST_NAMED = 4  # objects that are arguments of tf.train.Checkpoint


def loading_lines(target: str, kind: TargetKind, tree: Tree, *, foreign: bool = False) -> tuple[str, ...]:
    """Return at most eight lines that load the target, none for targets of an RL library's own form.

    `tree` is the one that was written to `target`, a file or a TensorFlow prefix. Names that are `foreign`,
    of another framework, may begin with objects that no PyTorch model has.
    """
    if kind is TARGETS["torch"]:
        return _torch(target, tree, foreign=foreign)
    if kind is TARGETS["tf"]:
        return _objects(target, tree)
    if kind is TARGETS["tf1"]:
        return (f"tf.compat.v1.train.Saver().restore(session, {_text(target)})",)
    if kind is TARGETS["keras"]:
        return _keras(target, tree, str(kind.options.get("root", "")))
    return ()


def _text(value: object) -> str:
    """Return a string or a number as Python spells it, in double quotes where that needs no escape."""
    if not isinstance(value, str):
        return repr(value)
    plain = value.isprintable() and '"' not in value and "\\" not in value
    return f'"{value}"' if plain else ascii(value)


def _torch(target: str, tree: Tree, *, foreign: bool) -> tuple[str, ...]:
    states, optimizers = _states(tree)
    source = f"torch.load({_text(target)}, weights_only=True)"
    if not states:
        return (f"tensors = {source}",)
    if len(states) == 1 and not optimizers:
        (at,) = states
        modules = _modules(at, tree)
        above = _shared(modules) if foreign else ""
        about = _listed("# modules of model: ", [name.removeprefix(above) for name in modules])
        if not above:
            return (_load_state(_name(at), at, f"{source}{_items(at)}", tree), *((about,) if foreign else ()))
        shorter = f"{{k.removeprefix({_text(above)}): v for k, v in state.items()}}"
        load = _load_state(_name(at), at, "state", tree)
        return (f"state = {source}{_items(at)}", f"state = {shorter}", load, about)
    lines = [f"checkpoint = {source}"]
    names = _names((*states, *optimizers))
    each = [_load_state(names[at], at, f"checkpoint{_items(at)}", tree) for at in names]
    room = _MOST - 1
    if len(each) <= room:
        return (*lines, *each)
    rest = [names[at] for at in (*states, *optimizers)[room - 1 :]]
    return (*lines, *each[: room - 1], _listed("# likewise ", rest))


def _modules(at: Path, tree: Tree) -> list[str]:
    """Return the modules' names in the keys of a state_dict."""
    names = [
        str(path[-1].value) for path, leaf in tree.tensors() if path[:-1] == at and leaf.role in _TRAINED
    ]
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names))


def _shared(modules: list[str]) -> str:
    """Return the objects above all modules, with the dot behind them: `model.` for model.fc1, model.fc2."""
    split = [name.split(".") for name in modules]
    depth = 0
    while all(len(each) > depth + 1 and each[depth] == split[0][depth] for each in split):
        depth += 1
    return "".join(f"{segment}." for segment in split[0][:depth])


def _states(tree: Tree) -> tuple[list[Path], list[Path]]:
    """Return where the written dict has state_dicts of modules, and of optimizers."""
    groups = [path[: _index(path)] for path in tree if _GROUPS in [step.value for step in path]]
    optimizers = list(dict.fromkeys(groups))
    states = dict.fromkeys(
        path[:-1]
        for path, leaf in tree.tensors()
        if leaf.role in _TRAINED and isinstance(path[-1].value, str) and "." in path[-1].value
    )
    inside = [at for at in states if not any(at[: len(o)] == o for o in optimizers)]
    return inside, optimizers


def _index(path: Path) -> int:
    return [step.value for step in path].index(_GROUPS)


def _load_state(name: str, at: Path, source: str, tree: Tree) -> str:
    children = [(path, leaf) for path, leaf in tree.items() if path[: len(at)] == at and path]
    others = [p for p, leaf in children if not isinstance(leaf, Leaf) or len(p) > len(at) + 1]
    optimizer = any(step.value == _GROUPS for path, _ in children for step in path[len(at) : len(at) + 1])
    strict = ", strict=False" if others and not optimizer else ""
    return f"{name}.load_state_dict({source}{strict})"


def _items(at: Path) -> str:
    return "".join(f"[{_text(step.value)}]" for step in at)


def _names(places: Collection[Path]) -> dict[Path, str]:
    """Return a variable's name for each place: longer ones, or numbers, where several would have one."""
    names = {at: _name(at) for at in places}
    longer = Counter(map(_joined, places))
    several = {name for name, count in Counter(names.values()).items() if count > 1}
    for number, (at, name) in enumerate(names.items()):
        if name in several:
            whole = _joined(at)
            names[at] = whole if longer[whole] == 1 and whole.isidentifier() else f"{name}_{number}"
    return names


def _joined(at: Path) -> str:
    return "_".join(re.sub(r"\W", "_", str(step.value), flags=re.ASCII) for step in at)


def _name(at: Path) -> str:
    """Return a variable's name for what lies at a path: `actor` for checkpoint["actor_state_dict"]."""
    for step in reversed(at):
        name = _shortened(str(step.value).replace("-", "_").replace(".", "_"))
        if name in _WHOLE:
            return "model"
        if name.isidentifier() and not keyword.iskeyword(name) and name.isascii():
            return name
    return "model"


def _shortened(name: str) -> str:
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    return name


def _objects(target: str, tree: Tree) -> tuple[str, ...]:
    """Return how `tf.train.Checkpoint` restores the objects: one at the root, or several by their names."""
    weights = [path for path, leaf in tree.tensors() if leaf.role in _TRAINED]
    tops = list(dict.fromkeys(str(path[0].value) for path in weights))
    optimizers = _keras_optimizers(tree)
    every = list(dict.fromkeys((*tops, *(str(top[0].value) for top in optimizers if top))))
    inside = {str(p[0].value) for p in tree if len(p) > 1}
    others = list(dict.fromkeys(name for p in tree if (name := str(p[0].value)) not in {*every, _SAVES}))
    others += [name for name in every if name not in inside]
    every = [name for name in every if name in inside]
    if _is_model(weights):
        others = [name for name in others if name not in tops]
    # A file of `write` or `save_weights` has no count of saves, which `restore` expects.
    kept = any(MARK in leaf.key for _, leaf in tree.tensors())
    read = "read" if kept and not any(str(path[0].value) == _SAVES for path in tree) else "restore"
    # `assert_consumed` would ask for a variable for every counter, too.
    check = "assert_existing_objects_matched" if others else "assert_consumed"
    restore = f".{read}({_text(target)}).{check}()"
    if _is_model(weights):
        lines = [f"tf.train.Checkpoint(model){restore}", _listed("# attributes of model: ", tops)]
        return (*lines, *_also(others))
    if not every:
        return (f"reader = tf.train.load_checkpoint({_text(target)})",)
    short = {name: _name((key(name),)) for name in every}
    named = short if len({*short.values()}) == len(short) else {name: name for name in every}
    if all(map(_is_word, every)) and len(every) <= _MOST_NAMED:
        values = ", ".join(f"{name}={_value(name, variable, tree)}" for name, variable in named.items())
        lines = [f"tf.train.Checkpoint({values}){restore}"]
    else:
        named = {name: name for name in every}
        lines = [_listed("# objects is a dict of ", [_text(name) for name in every])]
        lines.append(f"tf.train.Checkpoint(**objects){restore}")
    for name in [name for name in every if name in tops][:_MOST_NAMED]:
        below = dict.fromkeys(str(path[1].value) for path in weights if str(path[0].value) == name)
        inner = [step for step in below if not _EDGE.fullmatch(step)]
        if inner:
            lines.append(_listed(f"# attributes of {named[name]}: ", inner))
    lines += _also(others) or ["# with fewer objects: .assert_existing_objects_matched()"]
    return tuple(lines)


def _also(others: Collection[str]) -> list[str]:
    return [_listed("# the file also holds ", others)] if others else []


def _is_model(weights: Iterable[Path]) -> bool:
    """Whether the root is a model, whose layers its attributes are, and not a dict of objects."""
    deepest: dict[str, int] = {}
    for path in weights:
        top = str(path[0].value)
        deepest[top] = max(deepest.get(top, 0), len(path))
    if any(map(_EDGE.fullmatch, deepest)):
        return True
    # Variables of the root itself stand beside objects as well as beside layers.
    modules = [depth for depth in deepest.values() if depth > 1]
    return bool(deepest) and (not modules or (len(modules) > 1 and min(modules) == 2))


def _keras_optimizers(tree: Tree) -> list[Path]:
    """Return where optimizers stand: above a count of updates, or at the top with slots alone."""
    counted = dict.fromkeys(path[:-1] for path in tree if str(path[-1].value) in _COUNTS)
    with_slots = (path[:1] for path, leaf in tree.tensors() if leaf.role == "slot")
    return [*counted, *(top for top in dict.fromkeys(with_slots) if all(at[:1] != top for at in counted))]


def _value(name: str, variable: str, tree: Tree) -> str:
    """Return the expression for an object: a list where the file has optimizers by number."""
    numbers = [top[1].value for top in _keras_optimizers(tree) if str(top[0].value) == name and len(top) == 2]
    if not numbers or not all(str(number).isdecimal() for number in numbers):
        return variable
    if len(numbers) == 1:
        return "[optimizer]"
    return f"[{', '.join(f'optimizer_{number}' for number in range(len(numbers)))}]"


def _is_word(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)


def _keras(target: str, tree: Tree, root: str) -> tuple[str, ...]:
    load = target if target.endswith(_WEIGHTS) else f"{os.path.splitext(target)[0]}{_WEIGHTS}"
    # Keras asks for this ending.
    copied = () if load == target else (f"shutil.copyfile({_text(target)}, {_text(load)})",)
    paths = [path for path, leaf in tree.tensors() if leaf.role in _TRAINED]
    cut = int(bool(root) and all(str(path[0].value) == root and len(path) > 2 for path in paths))
    tops = dict.fromkeys(str(path[cut].value) for path in paths)
    about = [_listed("# attributes of model: ", tops)]
    if all(top.isdigit() or _EDGE.fullmatch(top) for top in tops):
        about = ["# model: a Sequential or functional model of the same layers"]
    elif any(len(path) - cut > 3 and not _EDGE.fullmatch(str(path[cut].value)) for path in paths):
        # Keras looks for what a model holds below `layers` first, and gives up on models inside of models.
        about.append("# make objects between model and its layers keras.layers.Layer, not keras.Model")
    return (*copied, f"model.load_weights({_text(load)})", *about)


def _listed(before: str, names: Iterable[str]) -> str:
    """Return names in one line, cut after the last one that fits."""
    shown = [name if name.isprintable() else ascii(name) for name in names]
    line = before + ", ".join(shown)
    while len(line) > _WIDTH and len(shown) > 1:
        shown.pop()
        line = f"{before}{', '.join(shown)}, ..."
    return line
