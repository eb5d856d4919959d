"""Trees of every kind for the formats that record them, and what it means that two are the same."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

from hypothesis import strategies as st

from ckpttool.core import Alias, Container, Inline, Leaf, Path, PathStep, Record, Tree, ValueLeaf, dtypes

TEXT = st.text(st.characters(exclude_categories=()), max_size=6)
STEPS = st.one_of(
    st.builds(PathStep, st.just("attr"), TEXT),
    st.builds(
        PathStep, st.just("key"), st.one_of(TEXT, st.integers(-5, 5), st.sampled_from([0.5, math.inf, None]))
    ),
    st.builds(PathStep, st.just("index"), st.integers(0, 9)),
)
PATHS = st.lists(STEPS, max_size=4).map(tuple)
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(1 << 300), 1 << 300), st.floats(), TEXT,
    st.binary(max_size=5), st.complex_numbers(), st.builds(Record, TEXT, TEXT),
)  # fmt: skip
STATES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(TEXT, st.integers()), inner, max_size=3),
        st.dictionaries(TEXT, inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=6,
)
KINDS = st.sampled_from(["dict", "OrderedDict", "list", "tuple", "record", "module"])
ROLES = st.sampled_from(["parameter", "buffer", "slot", "counter", "replay", "other"])
NUMPY = [
    "float32",
    "float64",
    "int64",
    "bool",
    "uint8",
    "complex64",
    "complex128",
    "float16",
    "bfloat16",
    "int4",
]
TORCH = ["float32", "float64", "int64", "bool", "uint8", "complex64", "uint16", "bfloat16", "float8_e4m3fn"]


@st.composite
def tensors(draw: st.DrawFn, torch: bool, paths: list[Path]) -> Leaf:
    dtype = draw(st.sampled_from(TORCH if torch else NUMPY))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    data = bytes(math.prod(shape) * dtypes.BY_NAME[dtype].itemsize)
    return Leaf(
        dtype,
        shape,
        Inline(data),
        "",
        draw(ROLES),
        of=draw(st.sampled_from([None, *paths])),
        slot=draw(st.one_of(st.none(), TEXT)),
        trainable=draw(st.one_of(st.none(), st.booleans())),
        name=draw(st.one_of(st.none(), TEXT)),
    )


@st.composite
def trees(draw: st.DrawFn, torch: bool) -> Tree:
    paths = draw(
        st.lists(PATHS, min_size=1, max_size=7, unique_by=lambda p: repr([(s.kind, s.value) for s in p]))
    )
    # 1 and True, 0.0 and False are one key to Python.
    paths = list(dict.fromkeys(paths))
    count = draw(st.integers(1, len(paths)))
    leaves: dict[Path, Leaf | ValueLeaf] = {}
    for path in paths[:count]:
        leaves[path] = draw(st.one_of(tensors(torch, paths[:count]), st.builds(ValueLeaf, PLAIN, ROLES)))
    arrays = [path for path, leaf in leaves.items() if isinstance(leaf, Leaf)]
    aliases: dict[Path, tuple[Alias, ...]] = {}
    for other in paths[count:] if arrays else ():
        path = draw(st.sampled_from(arrays))
        alias = Alias(other, draw(st.sampled_from(["", None])))
        aliases[path] = (*aliases.get(path, ()), alias)
    containers = draw(
        st.dictionaries(PATHS, st.builds(Container, KINDS, st.one_of(st.none(), TEXT), STATES), max_size=3)
    )
    return Tree(leaves, aliases, containers)


def same(result: Tree, tree: Tree, *, keys: bool = False) -> bool:
    """Say whether two trees are the same but for native keys, which are a format's own."""
    assert list(result) == list(tree)
    for path, leaf in tree.items():
        assert _facts(result[path], keys) == _facts(leaf, keys), path
    assert _aliases(result, keys) == _aliases(tree, keys)
    if tree.containers:
        assert _entry_texts(result) == _entry_texts(tree)
    return True


def _entry_texts(tree: Tree) -> dict[Path, str]:
    # As text, in which NaN is itself and 1 is not True.
    return {path: repr(kind) for path, kind in tree.containers.items()}


def _facts(leaf: Leaf | ValueLeaf, keys: bool) -> tuple[Any, ...]:
    if not isinstance(leaf, Leaf):
        return (type(leaf.value), repr(leaf.value), leaf.role)
    own = (leaf.key,) if keys else ()
    facts = (
        leaf.dtype,
        leaf.shape,
        bytes(leaf.read()),
        leaf.role,
        leaf.of,
        leaf.slot,
        leaf.trainable,
        leaf.name,
    )
    return (*own, *facts)


def _aliases(tree: Tree, keys: bool) -> dict[Path, list[tuple[Any, ...]]]:
    return {
        path: [(alias.path, alias.key if keys else alias.key is None) for alias in rest]
        for path, rest in tree.aliases.items()
    }
