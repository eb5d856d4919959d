"""Finds the layers of a tree, tensors that stand together under one module, and what becomes of each.

Where several kinds fit, a layer carries all of them: what decides is said by whoever knows (`Choice`), never
guessed from shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

from ckpttool.activations import MOST_FEATURES, NO_IMAGE, UNKNOWN, Features, Order, natural
from ckpttool.errors import MappingError, UsageError
from ckpttool.leaf import Leaf, Path
from ckpttool.mapping import kinds, modules
from ckpttool.mapping.kinds import UNTOLD, Kind, Told
from ckpttool.mapping.modules import NOT_TOLD, About, Name
from ckpttool.mapping.parts import merged
from ckpttool.mapping.rules import KEEP, Rule, chained
from ckpttool.tree import Tree


class Choice(NamedTuple):
    """What somebody said of the layers whose name a pattern fits: their kind, or more (see Told)."""

    pattern: str
    fits: Callable[[str], bool]
    kind: str | None = None
    told: Told = UNTOLD


class Layer(NamedTuple):
    """One layer: its module's name as people read it, the kinds that fit, its tensors by stored name.

    A PyTorch module of several recurrent layers is several layers, each with its `part`: "l0", "l0_reverse".
    `told` is what somebody says of it, `about` what the file does; `given` says that an option names its
    kind.
    """

    name: Name
    kinds: tuple[Kind, ...]
    tensors: Mapping[str, Path]
    part: str = ""
    told: Told = UNTOLD
    about: About = NOT_TOLD
    given: bool = False

    @property
    def title(self) -> str:
        """Return the name as one text."""
        return "/".join((*self.name, self.part) if self.part else self.name)

    @property
    def kind(self) -> Kind:
        """The one kind that fits; raise MappingError if several do."""
        if len(self.kinds) != 1:
            named = " or ".join(dict.fromkeys(kind.option for kind in self.kinds))
            raise MappingError("the layer is of one of several kinds", path=self.title, expected=named)
        return self.kinds[0]

    def group(self, tree: Tree) -> dict[str, Leaf]:
        """Return the layer's tensors by stored name."""
        return {name: leaf for name, path in self.tensors.items() if isinstance(leaf := tree[path], Leaf)}


class Done(NamedTuple):
    """What becomes of one layer: ways from source paths to stored names of the target, and what is added.

    `left` are source leaves that have no place in the target.
    """

    moves: tuple[tuple[Path, str, Rule], ...]
    added: Mapping[str, Leaf]
    left: tuple[Path, ...]
    assumed: tuple[str, ...]


def layers(
    tree: Tree,
    framework: str,
    given: Sequence[Choice] = (),
    described: Mapping[Path, About] | None = None,
    *,
    classes: bool = True,
    composed: Iterable[str] = (),
) -> tuple[Layer, ...]:
    """Return the layers of a framework's tree in its order; tensors of no known kind are in none.

    `composed` are kinds of several modules that are recognised without being asked for. `described` has for
    tensors of whole modules what the file says of their module. Without `classes`, a class that is no known
    layer does not keep tensors from being taken for one: between two models of one framework nothing
    depends on it.

    Raise UsageError for a choice that fits no layer, or a kind that a layer cannot be.
    """
    asked: dict[str, Callable[[str], bool]] = {
        name: partial(_is_given, [choice for choice in given if choice.kind == name])
        for name in {choice.kind for choice in given}
        if name is not None
    }
    asked |= dict.fromkeys(composed, lambda _: True)
    found = []
    used: set[int] = set()
    named = partial(_is_given, [choice for choice in given if choice.kind is not None])
    for module in modules.modules(tree, framework, asked, described, named):
        group = module.group(tree)
        fitting = kinds.candidates(group, framework, module.last)
        if not fitting and framework == "tensorflow" and named("/".join(module.name)):
            fitting = tuple(kind for kind in kinds.NUMBERED if kind.fits(group))
        if not fitting and classes:
            fitting = modules.misfit(module.about, framework)
        if not fitting:
            continue
        layer = Layer(
            module.name,
            fitting,
            module.tensors,
            module.part,
            _told(module.about, fitting, group),
            module.about,
        )
        said = {n: choice for n, choice in enumerate(given) if choice.fits(layer.title)}
        used |= said.keys()
        layer = _as_said(layer, list(said.values()), group, framework)
        if not any(choice.kind for choice in said.values()):
            layer = layer._replace(kinds=modules.narrowed(layer.kinds, group, module.about, classes=classes))
        found.append(layer)
    for number, choice in enumerate(given):
        if number not in used:
            raise UsageError(
                "no layer has such a name",
                path=choice.pattern,
                hint="ckpttool inspect shows the names; a pattern takes a layer's, without its tensors'",
            )
    return _with_orientation(tree, found)


def proposals(tree: Tree, framework: str, left: Iterable[Path]) -> tuple[str, ...]:
    """Return options that make layers of tensors which a program keeps without any, each of them tried.

    Such are `fc1_weight` beside `fc1_bias`, and `W` beside `b`. `left` are tensors of no known layer.
    """
    found: dict[str, str] = {}
    for path in left:
        leaf, (*module, name) = tree[path], tree.names[path].removesuffix(":0").split("/")
        joined = modules.joined(name)
        if not isinstance(leaf, Leaf) or not (joined or name in _MATRICES):
            continue
        title = "/".join((*module, joined[0]) if joined else module)
        if title and len(leaf.shape) > 1:
            kind = "embedding" if joined and joined[1] == "embeddings" else "dense"
            found[title] = kind if len(leaf.shape) == 2 else "convolution"
    able = []
    for title, kind in found.items():
        said = Choice(title, title.__eq__, kind)
        try:
            named = [layer for layer in layers(tree, framework, [said]) if layer.title == title]
        except UsageError:
            continue
        able += [f"--kind '{title}={kind}'"] if named else []
    return tuple(able)


def numbered(tree: Tree, left: Collection[Path]) -> dict[str, tuple[str, ...]]:
    """Return by title the kinds that layers can have whose variables a Keras file only numbers.

    `left` are tensors of no known layer; a layer is among the result if one of its tensors is among them.
    """
    found: dict[str, tuple[str, ...]] = {}
    for module in modules.modules(tree, "tensorflow", {}, None):
        group = module.group(tree)
        if any(path in left for path in module.tensors.values()):
            able = tuple(dict.fromkeys(kind.option for kind in kinds.NUMBERED if kind.fits(group)))
            found |= {"/".join(module.name): able} if able else {}
    return found


_MATRICES = frozenset(("w", "W", "weight", "weights", "kernel"))


def _is_given(choices: Sequence[Choice], title: str) -> bool:
    return any(choice.fits(title) for choice in choices)


def _with_orientation(tree: Tree, found: Sequence[Layer]) -> tuple[Layer, ...]:
    """Return the layers, where one is a dense layer [in, out] by its bias the square ones with both ways.

    A model that multiplies x @ W in one layer (GPT-2) does so in others, whose shape does not show it.
    """
    if not any(layer.kinds[0].form in (kinds.IN_OUT, kinds.OUT_IN) for layer in found):
        return tuple(found)
    made = []
    for layer in found:
        both = kinds.oriented(layer.group(tree), layer.kinds[0].framework)
        told = layer.about.cls or layer.kinds[0].refused or layer.given
        unsure = len(both) > 1 and {kind.name for kind in layer.kinds} == {"dense"} and not told
        made.append(layer._replace(kinds=both) if unsure else layer)
    return tuple(made)


def _told(about: About, fitting: Sequence[Kind], group: Mapping[str, Leaf]) -> Told:
    """Return what the file tells: flattened images, heads of an attention, a multiplier."""
    heads = about.settings.get("num_heads")
    names = {kind.name for kind in fitting}
    told = Told(takes=_order(about.settings, "takes"), makes=_order(about.settings, "makes"))
    for leaf in group.values():
        # What the file's own computation records is more than its configuration.
        takes, makes = leaf.features or Features()
        told = told._replace(
            takes=takes if takes not in (None, UNKNOWN) else told.takes or takes,
            makes=makes if makes not in (None, UNKNOWN) else told.makes or makes,
        )
    if isinstance(heads, int) and heads > 0 and names == {"attention"}:
        return told._replace(number=heads)
    channels, groups = about.settings.get("out_channels"), about.settings.get("groups")
    if "depthwise" in names and isinstance(channels, int) and isinstance(groups, int) and groups > 0:
        return told._replace(number=channels // groups)
    found = about.settings.get("flattened")
    if told.takes is not None or not isinstance(found, list) or names != {"dense"}:
        return told
    return told._replace(flatten=tuple(found))


def _order(settings: Mapping[str, Any], side: str) -> Order | None:
    """Return the order that a file's facts name (formats/keras_tree/flow.py writes them)."""
    form, sizes = settings.get(f"{side}_order", "channels last"), settings.get(side)
    if form not in ("channels last", "channels first"):
        return UNKNOWN
    if not isinstance(sizes, list) or len(sizes) % 2 or not all(type(each) is int for each in sizes):
        return None
    parts = tuple(zip(sizes[::2], sizes[1::2], strict=True))
    if sum(places * channels for places, channels in parts) > MOST_FEATURES or min(sizes, default=0) < 1:
        return None
    return natural(parts, "torch" if form == "channels first" else "tensorflow")


def _as_said(layer: Layer, said: Sequence[Choice], group: Mapping[str, Leaf], framework: str) -> Layer:
    for choice in said:
        told, dense = layer.told, "dense" in {kind.name for kind in layer.kinds}
        if choice.told.flatten is not None or choice.told.takes is not None:
            _require_features(layer)
        takes, makes = (_in_own_order(each, framework) for each in (choice.told.takes, choice.told.makes))
        if choice.told.flatten and not dense:
            shape = choice.told.flatten
            takes = natural(((prod(shape[:-1]), shape[-1]),), framework)
            choice = choice._replace(told=choice.told._replace(flatten=None))
        elif choice.told.flatten == () and not dense:
            takes = NO_IMAGE
            choice = choice._replace(told=choice.told._replace(flatten=None))
        layer = layer._replace(
            told=told._replace(
                number=told.number if choice.told.number is None else choice.told.number,
                flatten=told.flatten if choice.told.flatten is None else choice.told.flatten,
                wanted=choice.told.wanted or told.wanted,
                takes=takes or told.takes,
                makes=makes or told.makes,
            )
        )
        if choice.kind is None:
            continue
        fitting = tuple(
            kind
            for kind in (*kinds.KINDS, *kinds.NUMBERED)
            if kind.framework == framework and kind.option == choice.kind and kind.fits(group)
        ) or tuple(
            # Another form of the kind, where shapes leave no usual one.
            kind
            for kind in kinds.KINDS
            if kind.framework == framework and kind.name == choice.kind and kind.fits(group)
        )
        if not fitting:
            able = dict.fromkeys(kind.option for kind in layer.kinds)
            raise UsageError(
                f"the layer cannot be {choice.kind}", path=layer.title, expected=" or ".join(able)
            )
        layer = layer._replace(kinds=fitting[:1], given=True)
    return layer


def _require_features(layer: Layer) -> None:
    if not {kind.name for kind in layer.kinds} & _FEATURES:
        raise UsageError(
            "only a dense, recurrent or convolutional layer or a norm takes a flattened image",
            path=layer.title,
        )


_FEATURES = frozenset(
    ("dense", "convolution", "lstm", "gru", "simple_rnn", "batch_norm", "layer_norm", "rms_norm", "prelu")
)


def _in_own_order(order: Order | None, framework: str) -> Order | None:
    """Return the order of parts that somebody named, as the framework flattens them."""
    return natural(order.parts, framework) if order is not None and order != NO_IMAGE else order


def converted(
    tree: Tree,
    layer: Layer,
    source: Kind,
    target: Kind,
    told: Told | None = None,
    between: Mapping[str, Rule] = MappingProxyType({}),
) -> Done:
    """Return what becomes of a layer, read as `source` and written as `target`.

    `told` is what is known of the target (its own shapes, ...), by default what is known of the layer;
    `between` are rules for canonical tensors on their way. Raise MappingError where the target has no such
    layer.
    """
    refused = source.refused or target.refused
    if refused is not None:
        raise MappingError(refused, path=layer.title)
    try:
        return _converted(tree, layer, source, target, layer.told if told is None else told, between)
    except MappingError as error:
        raise error.located(path=layer.title) from error.__cause__


def _converted(
    tree: Tree, layer: Layer, source: Kind, target: Kind, told: Told, between: Mapping[str, Rule]
) -> Done:
    reading = source.read(layer.group(tree), layer.told)
    writing = target.write(canonical(tree, layer, source), told)
    moves: list[tuple[Path, str, Rule]] = []
    added = dict(writing.fills)
    for stored, name, back in writing.rows:
        if name in reading.fills:
            _add(added, stored, back, reading.fills[name])
        moves += [
            (layer.tensors[row.stored], stored, chained(row.rule, between.get(name, KEEP), back))
            for row in reading.rows
            if row.canonical == name
        ]
    moved = {path for path, _, _ in moves}
    left = tuple(path for path in layer.tensors.values() if path not in moved)
    return Done(tuple(moves), added, left, (*reading.assumed, *writing.assumed))


def canonical(tree: Tree, layer: Layer, kind: Kind) -> dict[str, Leaf]:
    """Return a layer's canonical tensors, read as one kind; raise MappingError if they do not fit it."""
    group = layer.group(tree)
    try:
        reading = kind.read(group, layer.told)
    except MappingError as error:
        raise error.located(path=layer.title) from error.__cause__
    found = dict(reading.fills)
    for row in reading.rows:
        made = row.rule.leaf(group[row.stored])
        if isinstance(made, Leaf):
            found[row.canonical] = made
    return found


def _add(added: dict[str, Leaf], stored: str, rule: Rule, leaf: Leaf) -> None:
    """Add what a rule makes of a tensor that only one framework has; parts of one tensor go together."""
    made = rule.leaf(leaf)
    if not isinstance(made, Leaf):
        return
    whole = merged(added[stored], made) if stored in added else made
    if whole is None:
        raise MappingError("two tensors have one place in the target", path=stored)
    added[stored] = replace(whole, name=None)


def spelled(tree: Tree, layer: Layer, kind: Kind, framework: str) -> Kind:
    """Return how a framework spells a layer of a kind; raise MappingError if it has no such layer."""
    if kind.refused is not None:
        raise MappingError(kind.refused, path=layer.title)
    ranks = {name: len(leaf.shape) for name, leaf in canonical(tree, layer, kind).items()}
    able = [
        each for each in kinds.KINDS if (each.framework, each.name, each.form) == (framework, kind.name, "")
    ]
    for each in able:
        theirs = {weight.canonical: weight.rank for weight in each.weights}
        if all(theirs.get(name) == rank for name, rank in ranks.items()):
            return each
    for each in able:
        if each.writing is not None:
            return each
    for each in kinds.KINDS:
        # A norm over several axes, which only its class tells from a dense layer.
        if (
            (each.framework, each.name) == (framework, kind.name)
            and each.is_selected
            and each.form == kinds.AXES
        ):
            return each
    raise MappingError(f"{framework} has no such {kind.name}", path=layer.title)
