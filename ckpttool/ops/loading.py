"""The Python lines that load what a conversion wrote, made from the tree that was written."""

from __future__ import annotations

import keyword
import os
from collections.abc import Iterable

from ckpttool.leaf import Leaf, Path
from ckpttool.ops.targets import TARGETS, TargetKind
from ckpttool.tree import Tree

_MOST, _WIDTH = 4, 80
_GROUPS = "param_groups"
_ENDINGS = ("_state_dict", "_state", ".state_dict")
_WHOLE = frozenset(("state_dict", "model", "module", "net", "network", "params", "weights", "policy_dict"))
_WEIGHTS = ".weights.h5"
_TRAINED = ("parameter", "buffer")
# tf.train.Checkpoint makes this variable itself.
_SAVES = "save_counter"


def loading_lines(target: str, kind: TargetKind, tree: Tree, *, foreign: bool = False) -> tuple[str, ...]:
    """Return at most four lines that load the target, none for targets of an RL library's own form.

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
            return (_load_state(at, f"{source}{_items(at)}", tree), *((about,) if foreign else ()))
        shorter = f"{{k.removeprefix({_text(above)}): v for k, v in state.items()}}"
        return (f"state = {source}{_items(at)}", f"state = {shorter}", _load_state(at, "state", tree), about)
    lines = [f"checkpoint = {source}"]
    names = {at: _name(at) for at in (*states, *optimizers)}
    each = [_load_state(at, f"checkpoint{_items(at)}", tree) for at in (*states, *optimizers)]
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


def _load_state(at: Path, source: str, tree: Tree) -> str:
    children = [(path, leaf) for path, leaf in tree.items() if path[: len(at)] == at and path]
    others = [p for p, leaf in children if not isinstance(leaf, Leaf) or len(p) > len(at) + 1]
    optimizer = any(step.value == _GROUPS for path, _ in children for step in path[len(at) : len(at) + 1])
    strict = ", strict=False" if others and not optimizer else ""
    return f"{_name(at)}.load_state_dict({source}{strict})"


def _items(at: Path) -> str:
    return "".join(f"[{_text(step.value)}]" for step in at)


def _name(at: Path) -> str:
    """Return a variable's name for what lies at a path: `actor` for checkpoint["actor_state_dict"]."""
    for step in reversed(at):
        name = str(step.value).replace("-", "_").replace(".", "_")
        for ending in _ENDINGS:
            name = name.removesuffix(ending)
        if name in _WHOLE:
            return "model"
        if name.isidentifier() and not keyword.iskeyword(name) and name.isascii():
            return name
    return "model"


def _objects(target: str, tree: Tree) -> tuple[str, ...]:
    """Return how `tf.train.Checkpoint` restores the objects: one at the root, or several by their names."""
    layers = {path[:-1] for path, leaf in tree.tensors() if leaf.role in _TRAINED}
    tops = list(dict.fromkeys(str(p[0].value) for p, leaf in tree.tensors() if leaf.role in _TRAINED))
    others = [name for p in tree if len(p) == 1 and (name := str(p[0].value)) != _SAVES]
    # `assert_consumed` would ask for a variable for every counter, too.
    check = "assert_existing_objects_matched" if others else "assert_consumed"
    restore = f".restore({_text(target)}).{check}()"
    if any(len(at) < 2 for at in layers):
        return (f"tf.train.Checkpoint(model){restore}", _listed("# attributes of model: ", tops))
    every = dict.fromkeys(str(p[0].value) for p in tree if len(p) > 1)
    if all(map(_is_word, every)) and len(every) <= 3:
        named = ", ".join(f"{name}={name}" for name in every)
    else:
        named = "**objects"
    lines = [f"tf.train.Checkpoint({named}){restore}"]
    if named == "**objects":
        lines.insert(0, _listed("# objects is a dict of ", [_text(name) for name in every]))
    for name in list(every)[:1]:
        below = dict.fromkeys(str(p[1].value) for p in tree if len(p) > 2 and str(p[0].value) == name)
        lines.append(_listed(f"# attributes of {name}: ", list(below)))
    if others:
        lines.append(_listed("# the file also holds ", others))
    else:
        lines.append("# with fewer objects: .assert_existing_objects_matched()")
    return tuple(lines)


def _is_word(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)


def _keras(target: str, tree: Tree, root: str) -> tuple[str, ...]:
    load = target if target.endswith(_WEIGHTS) else f"{os.path.splitext(target)[0]}{_WEIGHTS}"
    # Keras asks for this ending.
    copied = () if load == target else (f"shutil.copyfile({_text(target)}, {_text(load)})",)
    paths = [path for path, leaf in tree.tensors() if leaf.role in _TRAINED]
    cut = int(bool(root) and all(str(path[0].value) == root and len(path) > 2 for path in paths))
    tops = dict.fromkeys(str(path[cut].value) for path in paths)
    about = _listed("# attributes of model: ", tops)
    if all(top.isdigit() for top in tops):
        about = "# model: a Sequential or functional model of the same layers"
    return (*copied, f"model.load_weights({_text(load)})", about)


def _listed(before: str, names: Iterable[str]) -> str:
    """Return names in one line, cut after the last one that fits."""
    shown = [name if name.isprintable() else ascii(name) for name in names]
    line = before + ", ".join(shown)
    while len(line) > _WIDTH and len(shown) > 1:
        shown.pop()
        line = f"{before}{', '.join(shown)}, ..."
    return line
