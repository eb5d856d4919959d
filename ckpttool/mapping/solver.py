"""Assignment of a checkpoint's modules to a model's."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise, permutations
from typing import Any, Literal

from ckpttool.core import deferred
from ckpttool.core.activations import NO_CALL, CallPlace
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.errors import MappingError, UsageError, abbreviate_list
from ckpttool.core.tree import Path, Tree
from ckpttool.mapping.feature_orders import AssumedParts
from ckpttool.mapping.layers import DIRECTION_NAME
from ckpttool.mapping.rules import Move

# tf.train.Checkpoint's edges between a Keras model and its layers, and groups in Keras's files.
_BOOKKEEPING = frozenset(
    ("_functional", "_operations", "_layers", "layers", "_self_tracked_trackables", "model_weights", "vars")
)
_COUNTED = deferred.compile(r"(?:layer_with_weights-|layer-)?(\d{1,9})")
# Keras's default layer names: the class in snake case.
_CLASSES = (
    "dense|einsum_dense|embedding|input_layer|bidirectional|time_distributed|prelu|p_re_lu|lstm|gru|simple_rnn|rnn"
    "|cu_dnnlstm|cu_dnngru|multi_head_attention|batch_normalization|layer_normalization|group_normalization"
    "|rms_normalization|(?:depthwise_|separable_)?conv[123]d(?:_transpose)?|sequential|functional|model"
)
_AUTO = deferred.compile(rf"({_CLASSES})(?:_(\d{{1,9}}))?")
# The two layers of a Bidirectional (keras/src/layers/rnn/bidirectional.py), and a torch module's parts.
_PART = deferred.compile(r"l(\d{1,9})(_reverse)?")
_DIGITS = deferred.compile(r"\d{1,9}")
# A list item in the TensorFlow models of Hugging Face: `layer_._0` is PyTorch's `layer.0`.
_ITEM = deferred.compile(r"(\w+)_\._(\d{1,9})")


class NameStep(NamedTuple):
    """One step of a layer's name: the text to compare (None if it only numbers), and its number."""

    text: str | None
    number: int = 0


def parse_layer_name(name: tuple[str, ...]) -> tuple[tuple[str, NameStep], ...]:
    """Return the steps of a name, without bookkeeping steps.

    Keras counts its layers by class through a whole program (`dense_7`), lists and Sequentials count their
    items: such numbers give an order and are never compared (keras/src/backend/common/name_scope.py,
    auto_name).
    """
    steps: list[tuple[str, NameStep]] = []
    for step in name:
        item = _ITEM.fullmatch(step)
        if item is not None and not (steps and steps[-1][1] == parse_name_step(item[1])):
            steps.append((item[1], parse_name_step(item[1])))
        if step and step not in _BOOKKEEPING:
            step = step if item is None else item[2]
            steps.append((step, parse_name_step(step)))
    return tuple(steps)


def parse_name_step(step: str) -> NameStep:
    """Parse one step of a name."""
    if (counted := _COUNTED.fullmatch(step)) is not None:
        return NameStep(None, int(counted[1]))
    if (auto := _AUTO.fullmatch(step)) is not None:
        return NameStep(None, int(auto[2] or 0))
    if (direction := DIRECTION_NAME.fullmatch(step)) is not None:
        return NameStep(direction[1])
    return NameStep(step.replace("_", "").replace("-", "").lower() or step)


def is_framework_counter(step: str) -> bool:
    """Return whether a step's number is the framework's count, not a list index or the program's word."""
    return parse_name_step(step).text is None and not step.isdecimal()


def count_of_class(name: str) -> tuple[str, int] | None:
    """Return Keras's class and count in a name that its program did not choose (`dense_7`), else None."""
    counted = _AUTO.fullmatch(name)
    return None if counted is None else (counted[1], int(counted[2] or 0))


def name_numbers(name: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of every step of a name; of two directions, forward is first.

    The comparison is step by step, because Keras's first name has no number: `sequential` precedes
    `sequential_1`.
    """
    return tuple(tuple(map(int, _DIGITS.findall(_number_direction(step)))) for step in name)


def name_stem(name: tuple[str, ...]) -> tuple[str, ...]:
    """Return the name without its numbers, shared by several numbered layers."""
    return tuple(_DIGITS.sub("", _number_direction(step)).rstrip("_-") for step in name)


def _number_direction(step: str) -> str:
    direction = DIRECTION_NAME.fullmatch(step)
    return step if direction is None else str(int(direction[1] == "backward"))


def steps_of_part(part: str, *, both: bool) -> tuple[str, ...]:
    """Return the Keras-style name of a torch module's recurrent layer: its number, then its direction."""
    match = _PART.fullmatch(part)
    if match is None:
        return (part,) if part else ()
    return (match[1], "backward_layer" if match[2] else "forward_layer") if both else (match[1],)


def part_depth(part: str) -> int:
    """Return the position of a torch module's recurrent layer among those that it calls in turn."""
    match = _PART.fullmatch(part)
    return 0 if match is None else int(match[1])


# Words for the purpose of a layer; those on one line are synonyms. Two lines of one family exclude each
# other: a value stream is not an advantage stream.
_FAMILIES = (
    (("q", "query", "wq"), ("k", "key", "wk"), ("value", "v", "val", "wv")),
    (("value", "v", "val"), ("advantage", "adv")),
    (
        ("mean", "mu", "means", "loc"),
        ("std", "sigma", "logstd", "log_std", "log_sigma", "logsigma", "logvar", "var", "scale", "log_scale"),
    ),
    (("actor", "policy", "pi"), ("critic", "qf", "qfunc", "value", "vf", "q", "v", "baseline")),
    (("online",), ("target", "targ", "tgt")),
    (("encoder", "enc"), ("decoder", "dec")),
    (("forward", "fwd"), ("backward", "bwd", "reverse")),
    (("student",), ("teacher",)),
    (("generator", "gen"), ("discriminator", "disc")),
    (("user",), ("item",)),
    (("left",), ("right",)),
)
# Common spelling of synonyms: that of the first family that contains the word.
_SPELLINGS: dict[str, str] = {}
for _same in (("o", "output", "out", "final", "wo"), *(same for family in _FAMILIES for same in family)):
    for _word in _same:
        _SPELLINGS.setdefault(_word, _same[0])
# Words for any layer or module, which do not distinguish them.
_GENERIC = frozenset(
    (
        "layer",
        "layers",
        "dense",
        "linear",
        "fc",
        "conv",
        "net",
        "network",
        "model",
        "module",
        "block",
        "blocks",
    )
) | frozenset(
    (
        "mlp",
        "kernel",
        "weight",
        "bias",
        "w",
        "b",
        "lin",
        "proj",
        "projection",
        "embedding",
        "embeddings",
        "norm",
    )
)
_SHORTEST = 3  # of abbreviated words
_TOKEN = deferred.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def name_tokens(name: tuple[str, ...]) -> frozenset[str]:
    """Return the words of a name that may distinguish layers, each in its common spelling."""
    tokens: set[str] = set()
    for step, word in parse_layer_name(name):
        if word.text is None:
            continue
        whole = re.sub(r"[\d_.-]+$", "", step.lower())
        parts = [whole] if whole in _SPELLINGS else [word.lower() for word in _TOKEN.findall(step)]
        tokens |= {_SPELLINGS.get(part, part) for part in parts if part not in _GENERIC}
    return frozenset(tokens)


_ATTENTION = _FAMILIES[0]


def words_contradict(one: frozenset[str], other: frozenset[str], *, attention: bool = True) -> bool:
    """Return whether words of two names exclude each other: one contains `value`, the other `advantage`.

    Without `attention`, `q` and `value` name the same: a model without keys has no queries.
    """
    for family in _FAMILIES:
        if family is _ATTENTION and not attention:
            continue
        mine, others = (
            {n for n, same in enumerate(family) if any(_SPELLINGS[word] in side for word in same)}
            for side in (one, other)
        )
        if mine and others and not mine & others:
            return True
    return False


# Quantities that names of lone tensors state: a variance is no standard deviation, a number no logarithm.
_SPREADS = {
    "variance": frozenset(("var", "variance", "logvar", "logvariance")),
    "deviation": frozenset(("std", "stddev", "stdev", "logstd", "logstddev", "rstd", "invstd")),
}
_FUNCTIONS = {
    "logarithm": deferred.compile(
        r"log(?:arithm|std|stddev|var|variance|sigma|scale|alpha|temp\w*|prob\w*)?"
    ),
    "reciprocal": deferred.compile(r"inv|inverse|reciprocal|rstd|invstd|precision"),
    "square": deferred.compile(r"squared?|sq"),
    "root": deferred.compile(r"sqrt"),
}
_UNNAMED = frozenset(("variable", "param", "parameter", "tensor", "buffer", "vars"))


def quantities_differ(one: str, other: str) -> bool:
    """Return whether the names of two tensors state different functions of a quantity (std, log_std)."""
    words = [{word.lower() for word in _TOKEN.findall(name)} - _UNNAMED for name in (one, other)]
    if not all(words):
        return False
    for function in _FUNCTIONS.values():
        if len({any(map(function.fullmatch, side)) for side in words}) > 1:
            return True
    spreads = [{name for name, same in _SPREADS.items() if side & same} for side in words]
    return all(spreads) and spreads[0].isdisjoint(spreads[1])


Signature = tuple[object, ...]


class LayerCandidate(NamedTuple):
    """A layer of either side: its name's steps, its possible kinds with shapes, its displayed name.

    `rank` is its position in the order in which its model lists or uses layers, -1 if the file has
    none. `call` is its place among the calls of its model. `settings` distinguish layers of
    the same kind and shape, by name and value. `listed` means that a number in its name follows a
    list of its model or the calls of its graph, not the order in which its program created layers.
    `lone` is a tensor outside of layers. `created` are positions in orders of creation, each comparable with
    those of the same order only.
    """

    name: tuple[str, ...]
    signatures: frozenset[Signature]
    shown: str = ""
    rank: int = -1
    call: CallPlace = NO_CALL
    settings: frozenset[tuple[str, object]] = frozenset()
    listed: bool = False
    lone: bool = False
    created: frozenset[tuple[object, Any]] = frozenset()

    @property
    def title(self) -> str:
        """Return the name as one string."""
        return "/".join(self.name)


_NOTHING = NameStep(None)


@dataclass(slots=True, eq=False)
class NameScope:
    """A module: its step of the name, its child modules, and its layers."""

    children: dict[str, NameScope] = field(default_factory=dict)
    word: NameStep = _NOTHING
    own: list[int] = field(default_factory=list)

    def named(self) -> dict[str, NameScope]:
        """Return the child modules by their names; omit duplicates."""
        scopes: dict[str, NameScope | None] = {}
        for child in self.children.values():
            if child.word.text is not None:
                scopes[child.word.text] = None if child.word.text in scopes else child
        return {text: child for text, child in scopes.items() if child is not None}

    def numbered(self) -> dict[str, NameScope]:
        """Return the child modules whose steps only number them."""
        return {step: child for step, child in self.children.items() if child.word.text is None}

    @property
    def is_group(self) -> bool:
        """Whether this is a group of siblings, or a whole model, not a module with a name."""
        return self.word is _NOTHING

    def only(self) -> NameScope | None:
        """Return the only child module, if there is nothing else."""
        return next(iter(self.children.values())) if len(self.children) == 1 and not self.own else None

    def layers(self, without: Iterable[NameScope] = ()) -> list[int]:
        """Return the layers in order, sorted by number where numbered, without those of some modules."""
        left, layers = set(map(id, without)), []
        waiting = [self]
        while waiting:
            node = waiting.pop()
            layers += node.own
            children = [child for child in node.children.values() if id(child) not in left]
            if all(child.word.text is None for child in children) and node.counted():
                children.sort(key=lambda child: child.word.number)
            waiting += reversed(children)
        return layers

    def counted(self) -> bool:
        """Return whether the numbers of the child modules form a single row."""
        numbers = [child.word.number for child in self.children.values()]
        stems = {name_stem((step,)) for step in self.children}
        return len(set(numbers)) == len(numbers) and len(stems) == 1


def pair_scopes(
    source: NameScope, target: NameScope, agree: Callable[[NameScope, NameScope], bool]
) -> list[tuple[NameScope, NameScope]]:
    """Return the child modules with the same name in two modules.

    Numbers count as names if both sides have the same ones, or if all of one side's list are in the
    other's, and all of these modules `agree`.
    """
    named, shifted = target.named(), _shifted_names(source, target)
    scopes = [
        (child, named[text])
        for text, child in source.named().items()
        if text in named and text not in shifted
    ]
    mine, others = source.numbered(), target.numbered()
    both = [step for step in mine if step in others]
    lists = all(step.isdecimal() for step in (*mine, *others))
    if both and (
        len(mine) == len(others) == len(both) or (lists and len(both) == min(len(mine), len(others)))
    ):
        counted = [(mine[step], others[step]) for step in both]
        if all(agree(one, other) for one, other in counted):
            scopes += counted
    return scopes


_NUMBERED_NAME = deferred.compile(r"(.*\D)(\d{1,9})", re.ASCII)


def _shifted_names(source: NameScope, target: NameScope) -> set[str]:
    """Return the numbered names of two modules counted from different numbers (fc_0, fc_1; fc1, fc2)."""
    sides: list[dict[str, dict[int, str]]] = []
    for scope in (source, target):
        rows: dict[str, dict[int, str]] = {}
        for step, child in scope.children.items():
            match = _NUMBERED_NAME.fullmatch(child.word.text or "")
            if match is not None:
                rows.setdefault(match[1], {})[int(match[2])] = step
        sides.append(rows)
    names: set[str] = set()
    for stem, mine in sides[0].items():
        others = sides[1].get(stem, {})
        if not others or mine.keys() == others.keys() or min(mine) == min(others):
            continue
        part = mine.keys() <= others.keys() or others.keys() <= mine.keys()
        if not part or any(mine[n] != others[n] for n in mine.keys() & others.keys()):
            names |= {f"{stem}{n}" for n in mine}
    return names


def build_scope(every: Sequence[LayerCandidate], some: Iterable[int]) -> NameScope:
    """Return some of the layers as a tree of modules, in their order."""
    root = NameScope()
    for number in some:
        node = root
        for step, word in parse_layer_name(every[number].name):
            node = node.children.setdefault(step, NameScope(word=word))
        node.own.append(number)
    return root


def add_call_places(
    sources: Sequence[LayerCandidate], targets: Sequence[LayerCandidate]
) -> tuple[list[LayerCandidate], list[LayerCandidate], bool]:
    """Return both sides with each layer's position in the order of calls among its settings.

    The position of a layer follows from its kind and shape, from its inputs and consumers, and from the
    outputs of the model that depend on it. It is evidence only if both sides have equally many layers at
    each position; otherwise lone tensors are left out, then outputs count as equal, and then the settings
    stay unchanged. The third result is whether only the order of the outputs distinguishes some positions.
    """
    sides = list(sources), list(targets)
    with_lone = _add_places(sides, lone=True) if any(layer.lone for layer in (*sources, *targets)) else None
    return with_lone or _add_places(sides, lone=False) or (*sides, False)


def _add_places(
    pair: tuple[list[LayerCandidate], list[LayerCandidate]], *, lone: bool
) -> tuple[list[LayerCandidate], list[LayerCandidate], bool] | None:
    """Return what add_call_places returns, None where the sides disagree; `lone` includes lone tensors."""
    sides = list(pair[0]), list(pair[1])
    known = frozenset.intersection(
        *(frozenset(s for part in side if lone or not part.lone for s in part.signatures) for side in sides)
    )
    kinds = [[frozenset(layer.signatures & known) for layer in side] for side in sides]
    # A kind is no evidence if a call of one of its layers was not observed, or if only one side has it.
    unseen = {
        s
        for side, own in zip(sides, kinds, strict=True)
        for layer, kind in zip(side, own, strict=True)
        for s in kind
        if layer.call.number < 0
    }
    marks: list[dict[int, object]] = [
        {n: tuple(sorted(map(repr, kind))) for n, kind in enumerate(own) if kind and not kind & unseen}
        for own in kinds
    ]
    if min(map(len, marks)) < 2 or len(marks[0]) > _MOST_PLACED:
        return None
    with_outputs: list[dict[int, object]] = [
        {n: (mark, side[n].call.leads) for n, mark in own.items()}
        for side, own in zip(sides, marks, strict=True)
    ]
    places = plain = _find_places(sides, marks)
    by_outputs = _find_places(sides, with_outputs)
    decide = bool(by_outputs) and len({*by_outputs[0].values()}) > len({*plain[0].values()} if plain else ())
    places = by_outputs if decide else plain
    if not places:
        return None
    for side, own in zip(sides, places, strict=False):
        for n, index in own.items():
            side[n] = side[n]._replace(settings=side[n].settings | {(PLACE, index)})
    return *sides, decide


PLACE = "position in the order of calls"
# The order of creation that the source itself has.
FILE = "file"
# Whether a layer has a bias: one of equal shape without it cannot take its numbers.
BIAS = "bias"
_ROUNDS = 8
_MOST_PLACED = 600


def _find_places(
    sides: Sequence[Sequence[LayerCandidate]], marks: Sequence[Mapping[int, object]]
) -> Sequence[Mapping[int, object]]:
    """Return the positions of the layers on both sides, refined from their marks; none if they disagree."""
    numbers: dict[object, int] = {}
    before = 0
    for _ in range(_ROUNDS):
        marks = [_refine_marks(side, own, numbers) for side, own in zip(sides, marks, strict=True)]
        counts = [sorted(map(str, own.values())) for own in marks]
        if counts[0] != counts[1]:
            return ()
        now = len(set(counts[0]))
        if now == before:
            break
        before = now
    return marks


def _refine_marks(
    side: Sequence[LayerCandidate], marks: Mapping[int, object], numbers: dict[object, int]
) -> dict[int, object]:
    """Return each layer's mark combined with those of the layers before and after it."""
    above: dict[int, list[str]] = {n: [] for n in marks}
    below: dict[int, list[str]] = {n: [] for n in marks}
    for n in marks:
        bits = side[n].call.after
        for other in marks:
            if bits >> side[other].call.number & 1 and other != n:
                above[n].append(str(marks[other]))
                below[other].append(str(marks[n]))
    return {
        n: numbers.setdefault((mark, tuple(sorted(above[n])), tuple(sorted(below[n]))), len(numbers))
        for n, mark in marks.items()
    }


By = Literal["given", "name", "outputs", "words", "numbers", "calls", "only fit", "creation", "order"]
# Confidence in a match, in words.
CONFIDENCE: dict[By, str] = {
    "given": "given",
    "name": "high",
    "outputs": "high",
    "words": "medium",
    "numbers": "medium",
    "calls": "medium",
    "only fit": "medium",
    "creation": "low",
    "order": "low",
}
Ordered = Literal["calls", "numbers"]
Numbers = tuple[tuple[int, ...], ...]
# Where Keras lists the layers of a model, regardless of nesting (keras/src/models/functional.py).
_LISTS = frozenset(("_operations", "_layers", "_self_tracked_trackables"))
_NETWORK = deferred.compile(r"(?:sequential|functional|model)(?:_\d+)?")
_Links = dict[tuple[str, ...], set[tuple[str, ...]]]


class LayerPair(NamedTuple):
    """A source layer and its target layer, by their positions in the two lists."""

    source: int
    target: int
    by: By


class AmbiguousGroup(NamedTuple):
    """Layers of both sides that fit each other, without evidence for the pairs.

    `ordered` is the kind of order shared by both sides, so that accepting the order may be right.
    `differ` means that the names state different functions of a quantity.
    """

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    ordered: Ordered | None = None
    differ: bool = False


class Solution(NamedTuple):
    """The pairs in target order, the ambiguous groups, and pairs with the same name that do not fit.

    `counted` are pairs in which one side's numbers are the framework's count, `numbered` those with
    numbers chosen by both programs, in names that differ, `renamed` those whose names belong to other
    layers, `normed` batch norms of matched layers, `inner` those that belong to the modules of their other
    layers although words of their names are elsewhere.
    """

    pairs: tuple[LayerPair, ...]
    ambiguous: tuple[AmbiguousGroup, ...]
    misfits: tuple[LayerPair, ...]
    counted: tuple[LayerPair, ...] = ()
    numbered: tuple[LayerPair, ...] = ()
    renamed: tuple[LayerPair, ...] = ()
    normed: tuple[LayerPair, ...] = ()
    inner: tuple[LayerPair, ...] = ()


def solve(
    sources: Sequence[LayerCandidate],
    targets: Sequence[LayerCandidate],
    *,
    in_order: bool = True,
    pairs: Sequence[tuple[str, str]] = (),
    accept_order: bool = False,
    by_creation: bool = False,
) -> Solution:
    """Return the source for each target; raise UsageError for a name in `pairs` that does not exist.

    Names are compared from the root: modules with the same name are one scope, and its contents match nothing
    outside. Remaining layers are matched by a unique fit of kind and shape, by words common to both sides, by
    modules whose other layers are matched, and by numbers that count the layers on both sides. The order in
    which the two sides list layers is not evidence: it decides only if the user accepts it.

    Args:
        sources: the layers of the source.
        targets: the layers that are to be filled.
        in_order: the source lists its layers in the order of creation; otherwise only numbers in names give
            an order.
        pairs: pairs of source and target names of modules or layers.
        accept_order: the order decides if no other evidence does.
        by_creation: layers that the target calls one after the other are matched in the order in which the
            source created its layers, if no other evidence decides.
    """
    return _Solver(sources, targets, in_order, accept_order, by_creation).solved(pairs)


class _Solver:
    def __init__(
        self,
        sources: Sequence[LayerCandidate],
        targets: Sequence[LayerCandidate],
        *orders: bool,
    ) -> None:
        self.sources, self.targets = sources, targets
        self.in_order, self.accept_order, self.by_creation = orders
        self.pairs: list[LayerPair] = []
        self.ambiguous: list[AmbiguousGroup] = []
        self.misfits: list[LayerPair] = []
        self.counted: list[LayerPair] = []
        self.numbered: list[LayerPair] = []
        self.normed: list[LayerPair] = []
        self._normed: tuple[dict[int, tuple[int, bool]] | None, dict[int, tuple[int, bool]] | None] = (
            None,
            None,
        )
        self._crossed: set[int] = set()
        self._inner: set[int] = set()
        self._tokens: tuple[dict[int, frozenset[str]], dict[int, frozenset[str]]] = ({}, {})
        self._attends: bool | None = None
        # By height above the layers: modules of one side, and the other side's modules that contain the
        # matching layers.
        self._links: tuple[tuple[_Links, _Links], ...] = (({}, {}), ({}, {}), ({}, {}))
        self._linked = 0

    def solved(self, pairs: Sequence[tuple[str, str]]) -> Solution:
        """Return the complete solution."""
        matched: tuple[set[int], set[int]] = set(), set()
        for sources, targets in pairs:
            left = (
                # A layer that the source shares may fill several of the model's.
                _find_below(self.sources, sources, matched[0]) or _find_below(self.sources, sources, ()),
                _find_below(self.targets, targets, matched[1]),
            )
            for names, layers in zip((sources, targets), left, strict=True):
                if not layers:
                    raise UsageError("no layer matches the name in --match", found=names)
            for known, word in zip(matched, left, strict=True):
                known |= set(word)
            self._stated(*left)
        rest = [
            build_scope(every, [n for n in range(len(every)) if n not in known])
            for every, known in zip((self.sources, self.targets), matched, strict=True)
        ]
        self._close(*self._scope(*rest))
        return Solution(
            tuple(sorted(self.pairs, key=lambda pair: pair.target)),
            tuple(self.ambiguous),
            tuple(self.misfits),
            tuple(sorted(self.counted, key=lambda pair: pair.target)),
            tuple(sorted(self.numbered, key=lambda pair: pair.target)),
            tuple(pair for pair in self.pairs if pair.target in self._crossed and pair.by != "given"),
            tuple(sorted(self.normed, key=lambda pair: pair.target)),
            tuple(pair for pair in self.pairs if pair.source in self._inner and pair.by == "only fit"),
        )

    def _stated(self, sources: list[int], targets: list[int]) -> None:
        if len(sources) == len(targets) == 1:
            fits = self._fits(sources[0], targets[0])
            (self.pairs if fits else self.misfits).append(LayerPair(sources[0], targets[0], "given"))
            return
        before = len(self.pairs)
        self._close(*self._scope(build_scope(self.sources, sources), build_scope(self.targets, targets)))
        self.pairs[before:] = [
            pair if CONFIDENCE[pair.by] == "low" else pair._replace(by="given")
            for pair in self.pairs[before:]
        ]

    def _fits(self, source: int, target: int) -> bool:
        return not self.sources[source].signatures.isdisjoint(self.targets[target].signatures)

    # Names.

    def _scope(self, source: NameScope, target: NameScope) -> tuple[list[int], list[int]]:
        """Match the contents of two paired modules; return the rest of both sides."""
        named, above = pair_scopes(source, target, self._agree), (source, target)
        while not named:
            # A single module around everything is no evidence.
            if (inner := source.only()) is not None:
                source = inner
            elif (inner := target.only()) is not None:
                target = inner
            else:
                break
            named = pair_scopes(source, target, self._agree)
        named += self._one_sided(source, target, named)
        left: tuple[list[int], list[int]] = ([], [])
        for one, other in named:
            rest = self._scope(one, other)
            whole = not (one.is_group or other.is_group)
            if rest[0] and rest[1] and whole and self._crossed.isdisjoint(rest[1]):
                self._close(*rest)
            else:
                # Layers that one side has in excess, or in another place, may have their counterparts further
                # out.
                left[0].extend(rest[0])
                left[1].extend(rest[1])
        sources = [*source.layers(_expand_scopes(one for one, _ in named)), *left[0]]
        targets = [*target.layers(_expand_scopes(other for _, other in named)), *left[1]]
        if (source, target) == above:
            sources, targets = self._by_name(source.own, target.own, sources, targets)
        return self._settled(sources, targets)

    def _agree(self, one: NameScope, other: NameScope) -> bool:
        """Return whether two modules with the same number may match: layers that fit, or common kinds."""
        if one.children or other.children:
            signatures = {s for n in one.layers() for s in self.sources[n].signatures}
            return any(not signatures.isdisjoint(self.targets[n].signatures) for n in other.layers())
        return len(one.own) == len(other.own) == 1 and self._fits(one.own[0], other.own[0])

    def _one_sided(
        self, source: NameScope, target: NameScope, named: Sequence[tuple[NameScope, NameScope]]
    ) -> list[tuple[NameScope, NameScope]]:
        """Return modules with other names, or a module and its siblings, that contain the same names."""
        known = {id(module) for pair in named for module in pair}
        rest = [
            NameScope({step: child for step, child in side.children.items() if id(child) not in known})
            for side in (source, target)
        ]
        if not (rest[0].children and rest[1].children):
            return []
        holders = [_holders(side) for side in rest]
        edges: dict[tuple[int, int], tuple[NameScope, NameScope]] = {}
        several: set[int] = set()
        shifted = _shifted_names(*rest)
        for name, mine in holders[0].items():
            others = holders[1].get(name, []) if name not in shifted else []
            if len(mine) == len(others) == 1:
                edges[id(mine[0]), id(others[0])] = mine[0], others[0]
            elif others:
                several |= {id(module) for module in (*mine, *others)}
        degree = Counter(number for edge in edges for number in edge)
        return [
            (one, other)
            for (first, second), (one, other) in edges.items()
            if degree[first] == degree[second] == 1
            and not {first, second} & several
            and not self._contradict(
                name_tokens(_step_of(rest[0], one)), name_tokens(_step_of(rest[1], other))
            )
        ]

    def _by_name(
        self, source_numbers: list[int], target_numbers: list[int], sources: list[int], targets: list[int]
    ) -> tuple[list[int], list[int]]:
        """Match the layers of two modules with the same name."""
        if len(source_numbers) != 1 or len(target_numbers) != 1:
            return sources, targets
        source, target = source_numbers[0], target_numbers[0]
        if not self._fits(source, target):
            self.misfits.append(LayerPair(source, target, "name"))
            return sources, targets
        if self._is_elsewhere(source, target):
            self._crossed.add(target)
            return sources, targets
        self.pairs.append(LayerPair(source, target, "name"))
        return [n for n in sources if n != source], [n for n in targets if n != target]

    # Layers not decided by names.

    def _settled(self, sources: list[int], targets: list[int]) -> tuple[list[int], list[int]]:
        """Match all layers with evidence, until nothing changes; return the rest of both sides."""
        if not (sources and targets):
            return sources, targets
        left = self._only_fits(sources, targets)
        tried: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        while left[0] and left[1]:
            before = len(self.pairs)
            for having, wanting in self._groups(*left):
                if (mark := (tuple(having), tuple(wanting))) not in tried:
                    tried.add(mark)
                    self._resolve(having, wanting)
            if len(self.pairs) == before:
                break
            tried.clear()
            matched = {p.source for p in self.pairs[before:]}, {p.target for p in self.pairs[before:]}
            left = self._only_fits(*([n for n in left[i] if n not in matched[i]] for i in (0, 1)))
        if self.accept_order and left[0] and left[1]:
            left = self._accepted(*left)
        return left

    def _groups(self, sources: list[int], targets: list[int]) -> list[tuple[list[int], list[int]]]:
        """Return layers of one kind and shape on both sides; one with several kinds is in the first."""
        by_source, by_target = (
            _group_by_signature(self.sources, sources),
            _group_by_signature(self.targets, targets),
        )
        groups: dict[tuple[int, ...], list[int]] = {}
        for signature, wanting in by_target.items():
            if (having := by_source.get(signature)) is not None:
                groups.setdefault(tuple(wanting), having)
        return [(having, list(wanting)) for wanting, having in groups.items()]

    def _resolve(self, having: list[int], wanting: list[int]) -> None:
        """Match layers that all fit each other, by words, by their modules and by their numbers."""
        ways: tuple[tuple[Any, By], ...] = (
            (self._by_settings, "only fit"),
            (self._by_words, "words"),
            (self._by_modules, "only fit"),
        )
        for parted, by in ways:
            parts = parted(having, wanting)
            count = len(self.pairs)
            for source_part, target_part in parts:
                if len(source_part) == len(target_part) == 1:
                    if by == "words" and self._leaves_module(source_part[0], target_part[0], wanting):
                        self._inner.add(source_part[0])
                    else:
                        self._pair(source_part[0], target_part[0], by)
                elif len(source_part) < len(having) or len(target_part) < len(wanting):
                    self._resolve(source_part, target_part)
            if len(self.pairs) > count:
                return
        for parted in (self._by_numbers, self._by_calls, self._by_stems, self._by_normed_layers):
            parted(having, wanting)
            if len(self.pairs) > count:
                return

    def _pair(self, source: int, target: int, by: By) -> bool:
        """Match two unless their words exclude each other."""
        if (
            self._contradict(self._words(0, source), self._words(1, target))
            or self._is_elsewhere(source, target)
            or self._states_other(source, target)
        ):
            return False
        self.pairs.append(LayerPair(source, target, by))
        return True

    def _contradict(self, one: frozenset[str], other: frozenset[str]) -> bool:
        if self._attends is None:
            key = _ATTENTION[1][0]
            self._attends = all(
                any(key in self._words(side, n) for n in range(len(every)))
                for side, every in enumerate((self.sources, self.targets))
            )
        return words_contradict(one, other, attention=self._attends)

    def _is_elsewhere(self, source: int, target: int) -> bool:
        """Return whether two layers have different positions in the order of calls, with both recorded."""
        places = [
            {value for name, value in one.settings if name == PLACE}
            for one in (self.sources[source], self.targets[target])
        ]
        return all(places) and places[0] != places[1]

    def _states_other(self, source: int, target: int) -> bool:
        """Return whether two tensors outside of layers state different functions of a quantity."""
        one, other = self.sources[source], self.targets[target]
        return one.lone and other.lone and quantities_differ(one.name[-1], other.name[-1])

    def _words(self, side: int, number: int) -> frozenset[str]:
        known = self._tokens[side]
        if number not in known:
            known[number] = name_tokens((self.sources, self.targets)[side][number].name)
        return known[number]

    def _by_settings(self, having: list[int], wanting: list[int]) -> list[tuple[list[int], list[int]]]:
        """Return groups of both sides with the same settings, such as a dilation, if all have some."""
        source_settings = {n: self.sources[n].settings for n in having}
        target_settings = {n: self.targets[n].settings for n in wanting}
        every = [
            {name for name, _ in settings}
            for settings in (*source_settings.values(), *target_settings.values())
        ]
        both = set.intersection(*every)
        for known in (both, both - {BIAS}):
            sides = [
                {
                    n: frozenset(f"{name} {value}" for name, value in settings if name in known)
                    for n, settings in side.items()
                }
                for side in (source_settings, target_settings)
            ]
            if any(len(set(side.values())) < 2 for side in sides):
                continue
            counts = [Counter(side.values()) for side in sides]
            if counts[0] == counts[1]:
                return _pair_by_marks(*sides)
        return []

    def _by_words(self, having: list[int], wanting: list[int]) -> list[tuple[list[int], list[int]]]:
        """Return groups of both sides with the same distinguishing words, also abbreviated ones."""
        sides = {n: self._words(0, n) for n in having}, {n: self._words(1, n) for n in wanting}
        mine, others = (frozenset[str]().union(*side.values()) for side in sides)
        whole = _abbreviated(mine - others, others - mine)
        sides = sides[0], {n: frozenset(whole.get(word, word) for word in own) for n, own in sides[1].items()}
        # Words that only one side uses distinguish its layers too: `post_attention` is not `self_attention`.
        alike = [frozenset.intersection(*side.values()) for side in sides]
        common = mine & frozenset[str]().union(*sides[1].values()) - frozenset.intersection(*alike)
        if not common:
            return []
        parts = _pair_by_marks(*({n: own & common for n, own in side.items()} for side in sides))

        def has_others(side: int, part: list[int]) -> bool:
            return bool(frozenset.intersection(*(sides[side][n] for n in part)) - common - alike[side])

        return [part for part in parts if not all(map(has_others, (0, 1), part))]

    def _by_modules(self, having: list[int], wanting: list[int]) -> list[tuple[list[int], list[int]]]:
        """Return groups of both sides in modules whose other layers were matched with each other."""
        self._link()
        for height, (links, back) in enumerate(self._links, start=1):
            sides: list[dict[int, frozenset[str]]] = [{}, {}]
            for side, table, every in ((0, links, having), (1, back, wanting)):
                for n in every:
                    module = _parent_name((self.sources, self.targets)[side][n], height)
                    partners = table.get(module, set())
                    partner = next(iter(partners)) if len(partners) == 1 else None
                    sure = module and partner and len((back, links)[side][partner]) == 1
                    scope = (partner if side == 0 else module) if sure else None
                    sides[side][n] = frozenset(("/".join(scope),)) if scope else frozenset()
            parts = _pair_by_marks(*sides)
            if any(len(a) < len(having) or len(b) < len(wanting) for a, b in parts):
                return parts
        return []

    def _leaves_module(self, source: int, target: int, wanting: list[int]) -> bool:
        """Return whether another of these targets is in the module that contains the source's siblings."""
        self._link()
        links, back = self._links[0]
        module = _parent_name(self.sources[source], 1)
        partners = links.get(module, set())
        parents = {n: _parent_name(self.targets[n], 1) for n in wanting}
        return (
            bool(module)
            and len(partners) == 1
            and all(len(back[partner]) == 1 for partner in partners)
            and parents[target] not in partners
            and not partners.isdisjoint(parents.values())
        )

    def _link(self) -> None:
        """Record the modules connected by the pairs found since the last call."""
        for pair in self.pairs[self._linked :]:
            for height, (links, back) in enumerate(self._links, start=1):
                one = _parent_name(self.sources[pair.source], height)
                other = _parent_name(self.targets[pair.target], height)
                links.setdefault(one, set()).add(other)
                back.setdefault(other, set()).add(one)
        self._linked = len(self.pairs)

    def _by_numbers(self, having: list[int], wanting: list[int]) -> None:
        """Match two rows of layers that both sides number."""
        if len(having) != len(wanting):
            return
        source_row, target_row = _build_row(self.sources, having), _build_row(self.targets, wanting)
        if source_row is None or target_row is None:
            return
        agreed = source_row.agrees(target_row)
        if agreed is None:
            return
        calls = [self.targets[n] for n in target_row.layers]
        traced = all(one.call.number >= 0 for one in calls)
        chain = traced and _is_chain(calls)
        if agreed == "counted" and (
            source_row.by_construction or ((traced or target_row.by_construction) and not chain)
        ):
            return
        if not chain and self._differ_unseen(having, wanting):
            return
        if agreed == "named" and traced and any(b.call.number < a.call.number for a, b in pairwise(calls)):
            return  # the model does not call its layers in the order of their numbers
        for source, target in zip(source_row.layers, target_row.layers, strict=True):
            if self._pair(source, target, "numbers"):
                (self.counted if agreed == "counted" else self.numbered).append(self.pairs[-1])

    def _differ_unseen(self, having: list[int], wanting: list[int]) -> bool:
        """Return whether the model's layers have several settings, such as dilations, that the source lacks.

        Programs number such branches in different orders.
        """
        sides = [
            {
                n: frozenset(setting for setting in every[n].settings if setting[0] not in (PLACE, BIAS))
                for n in some
            }
            for every, some in ((self.sources, having), (self.targets, wanting))
        ]
        return len(set(sides[1].values())) > 1 == len(set(sides[0].values()))

    def _by_stems(self, having: list[int], wanting: list[int]) -> None:
        """Match layers that have several numbered names, by how many layers have each of these names.

        The norm of a stem (`bn1`) is a sibling of its blocks' norms (`layer1/0/bn1`), as `conv1_bn` is.
        """
        sides = [_group_by_stem(self.sources, having), _group_by_stem(self.targets, wanting)]
        alone = [len(side) == 1 for side in sides]
        if any(alone) and not all(alone):
            # One side has only numbers: `block1_0_conv` beside `block1_3_conv`, `block2_3_conv`.
            sides[0] = _group_by_stem(self.sources, having, numbered=alone[0])
            sides[1] = _group_by_stem(self.targets, wanting, numbered=alone[1])
        parts = [sorted(side.values(), key=len) for side in sides]
        sizes = [[len(part) for part in side] for side in parts]
        if sizes[0] != sizes[1] or not 1 < len(sizes[0]) == len(set(sizes[0])):
            return
        for source_part, target_part in zip(*parts, strict=True):
            if len(source_part) > 1:
                before = len(self.pairs)
                self._by_numbers(source_part, target_part)
                if len(self.pairs) == before:
                    self._by_calls(source_part, target_part)
            elif self._pair(source_part[0], target_part[0], "numbers"):
                self.numbered.append(self.pairs[-1])

    def _by_calls(self, having: list[int], wanting: list[int]) -> None:
        """Match a row of numbered layers with those of a model that calls them one after the other."""
        if len(having) != len(wanting) or any(self.targets[n].call.number < 0 for n in wanting):
            return
        row = _build_row(self.sources, having)
        targets = sorted(wanting, key=lambda n: self.targets[n].call.number)
        if row is None or row.has_networks or row.by_construction:
            return
        if not _is_chain([self.targets[n] for n in targets]):
            return
        own = _build_row(self.targets, wanting)
        if own is not None and not own.by_framework and own.layers != targets:
            return  # numbers chosen by the program give another order
        for source, target in zip(row.layers, targets, strict=True):
            if self._pair(source, target, "calls"):
                self.counted.append(self.pairs[-1])

    def _by_normed_layers(self, having: list[int], wanting: list[int]) -> None:
        """Match batch norms by the layers whose results they take, where these layers are matched.

        A name or a list may be another layer's, so nothing is matched if one norm of either side contradicts.
        """
        partners = {pair.source: pair.target for pair in self.pairs}
        normed, own = self._normed_layers(0), self._normed_layers(1)
        for pair in self.pairs:
            one, other = normed.get(pair.source), own.get(pair.target)
            if one is not None and other is not None and partners.get(one[0], other[0]) != other[0]:
                return
        by_layer = {own[n]: n for n in wanting if n in own}
        pairs: dict[int, int] = {}
        count = -1
        while count < len(pairs):
            count = len(pairs)
            for n in having:
                layer, alike = normed.get(n, _NO_LAYER)
                partner = partners.get(layer, pairs.get(layer))
                if n in pairs or partner is None:
                    continue
                target = by_layer.get((partner, alike))
                if target is None or target in pairs.values():
                    return
                pairs[n] = target
        by_place = self.in_order and any(self.sources[n].call.number < 0 for n in having)
        if by_place and not len(pairs) == len(having) == len(wanting):
            return
        for source, target in pairs.items():
            if self._pair(source, target, "calls"):
                self.normed.append(self.pairs[-1])

    def _normed_layers(self, side: int) -> dict[int, tuple[int, bool]]:
        """Return the layer whose result each batch norm takes, and whether that has as many channels.

        The calls of the model record it. Of a file without, the norm has the layer's name and channels
        (`conv1_bn`), or the source lists it directly behind the layer.
        """
        if (known := self._normed[side]) is not None:
            return known
        every = (self.sources, self.targets)[side]
        norms = {n for n, one in enumerate(every) if any(s[0] == "batch_norm" for s in one.signatures)}
        by_call = {one.call.number: n for n, one in enumerate(every) if one.call.number >= 0}
        named: dict[tuple[str, ...], list[int]] = {}
        for n, one in enumerate(every):
            if n not in norms and one.name and not one.lone:
                named.setdefault((*one.name[:-1], _strip_kind(one.name[-1])), []).append(n)
        normed: dict[int, tuple[int, bool]] = {}
        for n in norms:
            one, layer = every[n], None
            if one.call.number >= 0:
                before = [position for position in by_call if one.call.after >> position & 1]
                layer = by_call[max(before)] if before else None
            elif side == 0 and self.in_order:
                layer = n - 1 if n and not every[n - 1].lone else None
            elif one.name and len(same := named.get((*one.name[:-1], _strip_kind(one.name[-1])), [])) == 1:
                layer = same[0] if _widths(every[same[0]]) & _widths(one) else None
            if layer is not None:
                normed[n] = layer, bool(_widths(every[layer]) & _widths(one))
        self._normed = (normed, self._normed[1]) if side == 0 else (self._normed[0], normed)
        return normed

    def _only_fits(self, sources: list[int], targets: list[int]) -> tuple[list[int], list[int]]:
        """Match, until nothing changes, each target that fits only one source which no other target needs."""
        left = sources, targets
        while True:
            by_source, by_target = (
                _group_by_signature(self.sources, left[0]),
                _group_by_signature(self.targets, left[1]),
            )
            pairs: dict[int, int] = {}
            for signature, wanting in by_target.items():
                having = by_source.get(signature, [])
                alone = len(wanting) == len(having) == 1 and self._alone(having[0], wanting[0], by_source)
                if alone and having[0] not in pairs and self._pair(having[0], wanting[0], "only fit"):
                    pairs[having[0]] = wanting[0]
            if not pairs:
                return left
            matched = set(pairs.values())
            left = [n for n in left[0] if n not in pairs], [n for n in left[1] if n not in matched]

    def _alone(self, source: int, target: int, by_source: Mapping[Signature, list[int]]) -> bool:
        return all(by_source.get(s, [source]) == [source] for s in self.targets[target].signatures)

    # Order.

    def _accepted(self, sources: list[int], targets: list[int]) -> tuple[list[int], list[int]]:
        """Match the rest in order: whole rows if they agree, otherwise kind by kind."""
        rows: list[tuple[list[int], list[int]]] = []
        if self._order_of(sources, targets) == "calls":
            sources, targets = self._row_of(sources, targets) or (sources, targets)
        if self.in_order and len(sources) == len(targets) and all(map(self._fits, sources, targets)):
            rows = [(sources, targets)]
        else:
            rows = [
                row for group in self._groups(sources, targets) if (row := self._row_of(*group)) is not None
            ]
        matched: tuple[set[int], set[int]] = set(), set()
        for row in rows:
            for source, target in zip(*row, strict=True):
                free = source not in matched[0] and target not in matched[1]
                if free and not self._is_elsewhere(source, target):
                    self.pairs.append(LayerPair(source, target, "order"))
                    matched[0].add(source)
                    matched[1].add(target)
        return [n for n in sources if n not in matched[0]], [n for n in targets if n not in matched[1]]

    def _row_of(self, having: list[int], wanting: list[int]) -> tuple[list[int], list[int]] | None:
        """Return layers of one kind and shape in order, None if the source has none."""
        if len(having) != len(wanting):
            return None
        if all(self.sources[n].call.number >= 0 for n in having) and all(
            self.targets[n].call.number >= 0 for n in wanting
        ):
            having = sorted(having, key=lambda n: self.sources[n].call.number)
            wanting = sorted(wanting, key=lambda n: self.targets[n].call.number)
        elif not self.in_order and all(self.sources[n].rank >= 0 for n in having):
            having = sorted(having, key=lambda n: self.sources[n].rank)
        elif not self.in_order:
            counts = {name_numbers(self.sources[n].name) for n in having}
            if len({name_stem(self.sources[n].name) for n in having}) > 1 or len(counts) < len(having):
                return None
            having = sorted(having, key=lambda n: name_numbers(self.sources[n].name))
        return having, wanting

    def _by_created(self, having: list[int], wanting: list[int]) -> bool:
        """Match layers in the order of creation, which must be that of calls one after the other.

        Numbers and words of names and layers matched by other evidence must not give another order.
        """
        pairs = self._created_row(having, wanting)
        if not pairs or not self._agree_in_order(pairs) or self._matched_otherwise(pairs):
            return False
        self.pairs += [LayerPair(source, target, "creation") for source, target in pairs]
        return True

    def _created_row(self, having: list[int], wanting: list[int]) -> list[tuple[int, int]]:
        """Return the pairs of one row of layers, [] if it has no order or its names have another one."""
        row = _creation_row(self.sources, having)
        targets = sorted(wanting, key=lambda n: self.targets[n].call.number)
        if row is None or len(row) != len(targets):
            return []
        if self._differ_unseen(row, targets) and not _is_chain([self.targets[n] for n in targets]):
            return []
        for every, ordered in ((self.sources, row), (self.targets, targets)):
            numbered = _build_row(every, ordered) if len(ordered) > 1 else None
            otherwise = numbered is not None and not numbered.by_construction and numbered.layers != ordered
            if otherwise or _ends_first(every, ordered):
                return []
        pairs = list(zip(row, targets, strict=True))
        return pairs if all(self._follows(*one, *other) for one, other in pairwise(pairs)) else []

    def _matched_otherwise(self, pairs: Sequence[tuple[int, int]]) -> bool:
        """Return whether these, with the layers beside them that are matched, were created in another order.

        A program creates modules and the layers beside them in any order: all layers must agree then.
        """
        nested = len({len(self.sources[source].name) for source, _ in pairs}) > 1
        parents = {_parent_name(self.sources[source], 1) for source, _ in pairs}
        matched = ((pair.source, pair.target) for pair in self.pairs)
        rows = [*pairs, *(p for p in matched if nested or _parent_name(self.sources[p[0]], 1) in parents)]
        if len(rows) > _MOST_PLACED:
            return True
        places = [(dict(self.sources[source].created), self.targets[target].call) for source, target in rows]
        for (own, call), (other, next_call) in permutations(places, 2):
            follows = call.number >= 0 and next_call.after >> call.number & 1
            if follows and any(other[order] < own[order] for order in own.keys() & other.keys()):
                return True
        return False

    def _follows(self, source: int, target: int, next_source: int, next_target: int) -> bool:
        """Return whether a pair follows another one: by calls, by numbers of both sides, in one own class."""
        one, other = self.targets[target].call, self.targets[next_target].call
        if one.number >= 0 and other.after >> one.number & 1:
            return True
        sides = (self.sources, source, next_source), (self.targets, target, next_target)
        if all(_is_numbered_after(every[n].name, every[after].name) for every, n, after in sides):
            return True
        # Keras numbers the tensors of a program's own class: both classes create the same shapes in turn.
        if any(self.sources[n].name[-2:-1] != ("vars",) for n in (source, next_source)):
            return False
        rows = [_tensors_beside(every, n) for every, n, after in sides]
        inside = all(n in row and after in row for row, (_, n, after) in zip(rows, sides, strict=True))
        return inside and len(rows[0]) == len(rows[1]) and all(map(self._fits, *rows))

    def _agree_in_order(self, pairs: Sequence[tuple[int, int]]) -> bool:
        """Return whether nothing else contradicts the pairs: words, settings, places, modules."""
        words = [
            tuple(frozenset(word.rstrip("s") for word in side) for side in both)
            for both in ((self._words(0, source), self._words(1, target)) for source, target in pairs)
        ]
        everywhere = frozenset.intersection(*(word for both in words for word in both))
        mine, others = (frozenset[str]().union(*side) for side in zip(*words, strict=True))
        common = mine & others - everywhere
        parents = [
            (_parent_name(self.sources[source], 1), _parent_name(self.targets[target], 1))
            for source, target in pairs
        ]
        counts = [len(set(side)) for side in zip(*parents, strict=True)]
        return (
            all(one & common == other & common for one, other in words)
            and (min(counts) == 1 or len(set(parents)) == counts[0] == counts[1])
            and not any(
                self._contradict(self._words(0, source), self._words(1, target))
                or self._is_elsewhere(source, target)
                or self._states_other(source, target)
                or _settings_differ(self.sources[source], self.targets[target])
                for source, target in pairs
            )
        )

    def _close(self, sources: list[int], targets: list[int]) -> None:
        """Record the ambiguous layers in the rest of a scope."""
        while self.by_creation and any(self._by_created(*group) for group in self._groups(sources, targets)):
            known = {p.source for p in self.pairs}, {p.target for p in self.pairs}
            sources, targets = self._settled(
                [n for n in sources if n not in known[0]], [n for n in targets if n not in known[1]]
            )
        closest: set[int] = set()
        for having, wanting in self._groups(sources, targets):
            if not closest.issuperset(wanting):
                closest |= set(wanting)
                differ = all(self._states_other(one, other) for one in having for other in wanting)
                order = None if differ else self._order_of(having, wanting)
                self.ambiguous.append(AmbiguousGroup(tuple(having), tuple(wanting), order, differ))

    def _order_of(self, having: list[int], wanting: list[int]) -> Ordered | None:
        """Return the kind of order that both sides share for layers of one kind and shape, else None."""
        if self._row_of(having, wanting) is None:
            return None
        both = ([self.sources[n] for n in having], [self.targets[n] for n in wanting])
        if all(one.call.number >= 0 for side in both for one in side):
            return "calls"
        source_row, target_row = _build_row(self.sources, having), _build_row(self.targets, wanting)
        if source_row is None or target_row is None or source_row.nesting != target_row.nesting:
            return None
        unsure = any(row.by_construction or row.has_networks for row in (source_row, target_row))
        return None if unsure else "numbers"


class _LayerRow(NamedTuple):
    """Layers that one side numbers: their numbers, step by step, and the steps that differ.

    `listed` means that the numbers are positions in Keras's list of a model's layers, `by_place` that they
    are positions in a list of the program,
    `by_construction` that they are the order of creation in the program, which may differ from the
    order of calls.
    """

    layers: list[int]
    steps: list[tuple[str, ...]]
    counts: list[Numbers]
    varying: list[int]
    listed: bool = False
    by_construction: bool = False
    by_place: bool = False

    @property
    def by_framework(self) -> bool:
        """Return whether all numbers that differ are the framework's count."""
        return all(
            is_framework_counter(step) or (self.listed and step.isdecimal())
            for step in (self.steps[0][at] for at in self.varying)
        )

    @property
    def has_networks(self) -> bool:
        """Return whether the numbers are Keras's numbers of whole networks, which may be siblings."""
        return any(_NETWORK.fullmatch(self.steps[0][at]) for at in self.varying)

    @property
    def nesting(self) -> object:
        """Return the number of layers under each number, recursively."""
        return _nesting_shape([tuple(count[at] for at in self.varying) for count in self.counts])

    def agrees(self, other: _LayerRow) -> str | None:
        """Return how two rows of numbers correspond: "named", "counted" (by one side's framework), None."""
        if self.nesting == other.nesting and self.by_framework == other.by_framework:
            return "named"
        if self.by_framework == other.by_framework:
            mine, named = (other, self) if _is_grouped(self.nesting) else (self, other)
            if any(parse_name_step(mine.steps[0][at]).text is not None for at in mine.varying):
                return None
        else:
            mine, named = (self, other) if self.by_framework else (other, self)
        *outer, last = named.varying
        # Numbers in the words of a program (fc1, q1) may count parallel layers.
        if any(parse_name_step(named.steps[0][at]).text is not None for at in (*outer, last)):
            return None
        # Networks numbered only by the framework are parallel, in the order of construction.
        if mine.by_place and not _is_grouped(mine.nesting):
            return "named"
        return "counted" if len(mine.varying) == 1 and not mine.has_networks else None


def _build_row(every: Sequence[LayerCandidate], some: Sequence[int]) -> _LayerRow | None:
    """Return the layers sorted by their numbers, None unless only the numbers distinguish them."""
    steps = {n: tuple(step for step, _ in parse_layer_name(every[n].name)) for n in some}
    if len({name_stem(name) for name in steps.values()}) != 1:
        return None
    counts = {n: name_numbers(name) for n, name in steps.items()}
    if len(set(counts.values())) < len(some):
        return None
    ordered = sorted(some, key=counts.__getitem__)
    rows = [counts[n] for n in ordered]
    varying = [at for at in range(len(rows[0])) if len({row[at] for row in rows}) > 1]
    if all(every[n].rank >= 0 and _is_by_class(steps[n][at]) for n in some for at in varying):
        # Keras numbers layers of a class in the order of creation, which may differ from the order of calls.
        ordered = sorted(some, key=lambda n: every[n].rank)
        rows = [counts[n] for n in ordered]
    listed = any(not _LISTS.isdisjoint(every[n].name) for n in some)
    by_class = all(_is_by_class(steps[n][at]) for n in some for at in varying)
    by_construction = by_class and not listed and not all(every[n].listed for n in some)
    # A file of Keras 3 numbers the items of a list, an attribute of the program, by class.
    first = varying[0] if varying else 0
    placed = first > 0 and all(
        every[n].listed and parse_name_step(steps[n][first - 1]).text is not None for n in some
    )
    return _LayerRow(ordered, [steps[n] for n in ordered], rows, varying, listed, by_construction, placed)


# Words for the first and the last of a row of layers.
_ENDS = frozenset(("input", "inp", "in")), frozenset(("o", "head", "logits"))


def _ends_first(every: Sequence[LayerCandidate], row: Sequence[int]) -> bool:
    """Return whether names state that another layer than the first or the last is that one."""
    words = [name_tokens(every[n].name) for n in row]
    return any(not _ENDS[0].isdisjoint(own) for own in words[1:]) or any(
        not _ENDS[1].isdisjoint(own) for own in words[:-1]
    )


def _tensors_beside(every: Sequence[LayerCandidate], number: int) -> list[int]:
    """Return the tensors outside of layers in the module of one of them, in their order."""
    module = _parent_name(every[number], 1)
    row = [n for n, one in enumerate(every) if one.lone and _parent_name(one, 1) == module]
    return _creation_row(every, row) or row


def _creation_row(every: Sequence[LayerCandidate], some: Sequence[int]) -> list[int] | None:
    """Return layers in the order in which their program created them, None if it is unknown."""
    orders = {n: dict(every[n].created) for n in some}
    rows = {
        tuple(n for _, n in sorted((own[order], n) for n, own in orders.items()))
        for order in set.intersection(*map(set, orders.values()))
        if len({own[order] for own in orders.values()}) == len(some)
    }
    return [*next(iter(rows))] if len(rows) == 1 else None


def _is_numbered_after(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Return whether only a larger number distinguishes the first steps in which two names differ."""
    steps = next(((a, b) for a, b in zip(one, other, strict=False) if a != b), None)
    if steps is None or name_stem(steps[:1]) != name_stem(steps[1:]):
        return False
    if any(map(_NETWORK.fullmatch, steps)):
        return False  # the order of construction of siblings
    before, after = (name_numbers((step,)) for step in steps)
    return before < after


def _settings_differ(one: LayerCandidate, other: LayerCandidate) -> bool:
    mine, others = dict(one.settings), dict(other.settings)
    return any(mine[name] != others[name] for name in mine.keys() & others.keys())


_NO_LAYER = (-1, False)
# What names add for a norm, and for the layer itself: `bn_Conv1`, `block1a_bn` of `block1a_dwconv`.
_KIND_OF_LAYER = deferred.compile(
    r"(?:^|(?<=_))(?:bn|bnorm|batch_?norm(?:alization)?|norm|(?:dw)?conv(?:[123]d)?)(?:_|$)", re.IGNORECASE
)


def _strip_kind(step: str) -> str:
    return _KIND_OF_LAYER.sub("", step).strip("_").lower()


def _widths(one: LayerCandidate) -> frozenset[int]:
    """Return the possible numbers of channels of a layer's result: the last extent of its kernel or scale."""
    widths = set()
    for _, *shapes in one.signatures:
        for shape in shapes:
            extents = (
                shape[1] if isinstance(shape, tuple) and len(shape) == 2 and shape[0] == "kernel" else shape
            )
            if isinstance(extents, tuple) and extents and isinstance(extents[-1], int):
                widths.add(extents[-1])
    return frozenset(widths)


def _is_chain(called: Sequence[LayerCandidate]) -> bool:
    """Return whether the input of each layer depends on the layer before it."""
    return all(later.call.after >> earlier.call.number & 1 for earlier, later in pairwise(called))


def _group_by_stem(
    every: Sequence[LayerCandidate], some: Iterable[int], *, numbered: bool = False
) -> dict[tuple[object, ...], list[int]]:
    """Return the layers by the names without numbers, with the last number if `numbered`."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for n in some:
        steps = tuple(step for step, _ in parse_layer_name(every[n].name))
        last = [number for numbers in name_numbers(steps) for number in numbers][-1:] if numbered else ()
        groups.setdefault((*name_stem(steps), *last), []).append(n)
    return groups


def _is_by_class(step: str) -> bool:
    return is_framework_counter(step) and not step.startswith(("layer-", "layer_with_weights-"))


def _nesting_shape(counts: Sequence[Numbers]) -> object:
    """Return the shape of nested rows, ignoring steps that never have two numbers."""
    if not counts or not counts[0]:
        return len(counts)
    below: dict[tuple[int, ...], list[Numbers]] = {}
    for count in counts:
        below.setdefault(count[0], []).append(count[1:])
    if len(below) == 1:
        return _nesting_shape(next(iter(below.values())))
    inner = [_nesting_shape(rest) for rest in below.values()]
    return len(inner) if all(size == 1 for size in inner) else tuple(inner)


def _is_grouped(nesting: object) -> bool:
    return not isinstance(nesting, int)


def _abbreviated(mine: Iterable[str], others: Iterable[str]) -> dict[str, str]:
    """Return the words of the other side that alone abbreviate a word, or are abbreviated, by that word.

    A plural does not count: it names a list, whose items may be in another order.
    """
    near = [
        (one, other)
        for one in mine
        for other in others
        if min(len(one), len(other)) >= _SHORTEST
        and (one.startswith(other) or other.startswith(one))
        and one.rstrip("s") != other.rstrip("s")
    ]
    counts = Counter(word for pair in near for word in pair)
    return {other: one for one, other in near if counts[one] == counts[other] == 1}


def _pair_by_marks(
    source_marks: Mapping[int, frozenset[str]], target_marks: Mapping[int, frozenset[str]]
) -> list[tuple[list[int], list[int]]]:
    """Return the members of both sides that have equal marks."""
    groups: dict[frozenset[str], tuple[list[int], list[int]]] = {}
    for side, marked in enumerate((source_marks, target_marks)):
        for number, marks in marked.items():
            groups.setdefault(marks, ([], []))[side].append(number)
    return [(mine, others) for marks, (mine, others) in groups.items() if marks and mine and others]


def _parent_name(one: LayerCandidate, height: int) -> tuple[str, ...]:
    steps = tuple(step for step, _ in parse_layer_name(one.name))
    return steps[:-height]


def _expand_scopes(modules: Iterable[NameScope]) -> list[NameScope]:
    """Return the modules, replacing one that only groups others (see _one_sided) by these."""
    return [inner for module in modules for inner in (module, *module.children.values())]


def _unwrap_scope(module: NameScope) -> NameScope:
    while (inner := module.only()) is not None and inner.children:
        module = inner
    return module


def _holders(rest: NameScope) -> dict[str, list[NameScope]]:
    """Return by name the modules that contain one with that name: siblings here, and children there."""
    holders: dict[str, list[NameScope]] = {name: [rest] for name in rest.named()}
    for child in rest.children.values():
        inner = _unwrap_scope(child)
        for name in inner.named():
            holders.setdefault(name, []).append(inner)
    return holders


def _step_of(rest: NameScope, module: NameScope) -> tuple[str, ...]:
    return tuple(step for step, child in rest.children.items() if _unwrap_scope(child) is module)


def _group_by_signature(every: Sequence[LayerCandidate], some: Iterable[int]) -> dict[Signature, list[int]]:
    groups: dict[Signature, list[int]] = {}
    for number in some:
        for signature in every[number].signatures:
            groups.setdefault(signature, []).append(number)
    return groups


def _find_below(every: Sequence[LayerCandidate], name: str, used: Collection[int]) -> list[int]:
    prefix = name.replace(".", "/").strip("/")
    return [
        number
        for number, one in enumerate(every)
        if number not in used
        and any(title == prefix or title.startswith(f"{prefix}/") for title in (one.title, one.shown))
    ]


_MOST = 12
# Conditions under which an order may decide.
_HOLDS: dict[Ordered, str] = {
    "calls": "both programs call these layers in the same order",
    "numbers": "the numbers on both sides count the same layers in the same order",
}


@dataclass(frozen=True, slots=True)
class LayerMatch:
    """Match of one layer: source and target names, the kind, the evidence."""

    source: str
    target: str
    kind: str
    by: By

    def document(self) -> dict[str, str]:
        """Return the JSON object."""
        names = {"source": self.source, "target": self.target, "kind": self.kind}
        return {**names, "by": self.by, "confidence": CONFIDENCE[self.by]}


@dataclass(frozen=True, slots=True)
class Ambiguity:
    """Layers of both sides that fit each other, without evidence for the pairs.

    `ordered` is the kind of order shared by both sides; `differ` as in AmbiguousGroup. `missing` is what
    would let outputs decide, if that is known.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    ordered: Ordered | None = None
    differ: bool = False
    missing: str = ""

    def document(self) -> dict[str, list[str]]:
        """Return the JSON object."""
        return {"sources": list(self.sources), "targets": list(self.targets)}

    @property
    def sentence(self) -> str:
        """Sentence with the candidates of both sides, none chosen, and the options that decide."""
        pairs = " ".join(f"--match '{name}=TARGET'" for name in self.sources[:_MOST])
        sources, targets = (abbreviate_list(names, _MOST) for names in (self.sources, self.targets))
        if self.differ:
            return (
                f"{sources} fits {targets}, but the names state different quantities, such as a variance and "
                f"a standard deviation, or a number and its logarithm; use {pairs} only if the values are "
                "the same"
            )
        accepted = f"; use --accept-order only if {_HOLDS[self.ordered]}" if self.ordered else ""
        first = f"{self.missing}; else " if self.missing else ""
        return (
            f"ambiguous: {sources} could fill {targets}; {first}choose with {pairs} (each TARGET is one of "
            f"these), or pair the modules that contain them{accepted}"
        )


@dataclass(frozen=True, slots=True)
class Misfit:
    """A paired source and target, layer or tensor, that do not fit."""

    source: str
    target: str
    found: str
    expected: str
    # The setting that differs, if the tensors fit.
    setting: str = ""

    @property
    def error(self) -> MappingError:
        """The error for this misfit."""
        if self.setting:
            return MappingError(
                f"{self.source} and {self.target} have the same weights but compute different results",
                expected=f"{self.setting} {self.expected}",
                found=f"{self.setting} {self.found}",
                hint=f"set the model's {self.setting} as in the checkpoint",
            )
        unknown = "--kind '" in f"{self.expected} {self.found}"
        return MappingError(
            f"{self.source} and {self.target} are paired but do not match",
            expected=self.expected,
            found=self.found,
            hint="use --kind to name what the layer computes, as shown"
            if unknown
            else (
                "use a model with the checkpoint's layers and sizes, or pair layers with --match "
                "SOURCE=TARGET"
            ),
        )

    def document(self) -> dict[str, str]:
        """Return the JSON object."""
        return {
            "source": self.source,
            "target": self.target,
            "found": self.found,
            "expected": self.expected,
        }


@dataclass(frozen=True, slots=True)
class FillResult:
    """Conversion into a skeleton: its tree with the source's values, the moves, and open questions.

    `unfilled` are places in the skeleton that keep the values from their own program, `unused` source
    leaves, `misfits` pairs that were omitted because they do not fit. `evidence` is the evidence for
    each pair, by place. `assumed_parts` are the parts whose order is one of `assumed`.
    """

    tree: Tree
    moves: tuple[Move, ...]
    matched: tuple[LayerMatch, ...]
    ambiguous: tuple[Ambiguity, ...]
    unfilled: tuple[Path, ...]
    unused: tuple[Path, ...]
    assumed: tuple[str, ...]
    notes: tuple[str, ...]
    misfits: tuple[Misfit, ...] = ()
    evidence: Mapping[Path, By] = field(default_factory=dict)
    assumed_parts: tuple[AssumedParts, ...] = ()
