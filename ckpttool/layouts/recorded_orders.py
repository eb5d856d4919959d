"""Orders of flattened images as a file's own computation records them, for the layers that it calls.

A TorchScript archive holds the code of `forward`, a SavedModel the graph of its signature, an ONNX model its
graph. Each of them is evaluated on inputs whose entries are numbered (ckpttool.activations); no value is
computed and nothing of the file is run. A weight gets the order of what its layer takes and makes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ckpttool.activations import UNKNOWN, Activations, Features, Order, TooLargeError
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError
from ckpttool.leaf import Leaf, Path, ValueLeaf
from ckpttool.source import Shape
from ckpttool.tree import Tree

_IMAGE_RANK = 3
_COLOURS = 4
_MOST_ENTRIES = 1 << 23
_MOST_STEPS = 50_000


class UntraceableError(Exception):
    """The computation cannot be evaluated on shapes alone."""


class Activation:
    """One intermediate result: its shape, and the numbers of its entries, which are made when needed.

    `is_image` says that every entry already belongs to an image whose channels stand on the axis where the
    framework's convolutions have them.
    """

    __slots__ = ("_entries", "_make", "is_image", "shape")

    def __init__(self, shape: Sequence[int], make: Callable[[], Any], *, is_image: bool = False) -> None:
        """Describe a result; `make` returns the numbers of its entries in this shape."""
        self.shape = tuple(int(extent) for extent in shape)
        self.is_image = is_image
        self._make, self._entries = make, None

    @property
    def is_numbered(self) -> bool:
        """Whether something asked for the entries."""
        return self._entries is not None

    @property
    def entries(self) -> Any:
        """The numbers of the entries, an array of `shape`."""
        if self._entries is None:
            self._entries = self._make()
        return self._entries


class Opaque:
    """A result of an operation that is not evaluated; its last axis may still be known: that of a layer."""

    __slots__ = ("features",)

    def __init__(self, features: int | None = None) -> None:
        """Describe a result by the number of its features, if a layer with weights made it."""
        self.features = features


@dataclass
class Evaluation:
    """The activations of one call: operations that all frontends share, and what layers take and make.

    With `shapes_only` entries are not numbered: the call only shows whether shapes fit.
    """

    tree: Tree
    channel: int
    shapes_only: bool = False
    activations: Activations = field(default_factory=Activations)
    uses: dict[Path, dict[str, list[Any]]] = field(default_factory=dict)
    lost: bool = False
    _made: list[tuple[Path, Activation]] = field(default_factory=list)
    _steps: int = 0
    _numbered: int = 0

    # --- New results ------------------------------------------------------------------------------------

    def step(self) -> None:
        """Count one operation; raise UntraceableError for too many."""
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise UntraceableError

    def _room(self, shape: Sequence[int]) -> None:
        if any(extent < 0 for extent in shape) or math.prod(shape) > _MOST_ENTRIES:
            raise UntraceableError
        self._numbered += math.prod(shape)
        if self._numbered > _MOST_ENTRIES:
            raise TooLargeError

    def fresh(self, shape: Sequence[int]) -> Activation:
        """Return a result whose entries belong to no image yet."""

        def make() -> Any:
            self._room(shape)
            if self.shapes_only:
                return np.broadcast_to(np.int8(0), tuple(shape))
            return self.activations.plain(shape)

        return Activation(shape, make)

    def image(self, shape: Sequence[int]) -> Activation:
        """Return the images that a convolution or a pooling gives."""
        if any(extent < 1 for extent in shape):
            raise UntraceableError

        def make() -> Any:
            self._room(shape)
            if self.shapes_only:
                return np.broadcast_to(np.int8(0), tuple(shape))
            return self.activations.image(shape, self.channel % len(shape))

        return Activation(shape, make, is_image=True)

    def given(self, shape: Sequence[int]) -> Activation:
        """Return an input of the model, an image if its shape says so and nothing else contradicts it."""
        made = self.fresh(shape)
        # PyTorch's models of images that no convolution sees may take them with their channels last.
        first = self.channel == 1 and not (len(shape) > 2 and shape[1] <= _COLOURS < min(shape[2:]))
        if len(shape) > _IMAGE_RANK and not first and not self.shapes_only:
            self.activations.unless_known(made.entries, self.channel % len(shape))
        return made

    # --- Operations -------------------------------------------------------------------------------------

    def convolved(
        self, x: Activation, shape: Sequence[int], weight: Path | None = None, *, grouped: bool = False
    ) -> Activation:
        """Return what an operation on images makes of one, a convolution by its weight.

        A convolution's channels have an order of their own where a pixel shuffle stands beside it.
        """
        if len(x.shape) < _IMAGE_RANK or len(shape) != len(x.shape):
            raise UntraceableError
        if not x.is_image and not self.shapes_only:
            self.activations.take(x.entries, self.channel % len(x.shape))
        made = self.image(shape)
        if weight is not None and not grouped and not self.shapes_only:
            self._made.append((weight, made))
            if not x.is_image:
                self.takes(weight, x, self.channel % len(x.shape))
        return made

    def moved(self, x: Activation, move: Callable[[Any], Any]) -> Activation:
        """Return a result whose entries are those of another one, elsewhere."""
        try:
            made = move(x.entries)
        except (ValueError, IndexError, TypeError) as error:
            raise UntraceableError from error
        self._room(made.shape)
        return Activation(made.shape, lambda: made)

    def shuffled(self, x: Activation, move: Callable[[Any], Any], *, up: bool) -> Activation:
        """Return what a pixel shuffle makes of an image: places of channels if `up`, else the reverse."""
        made = self.moved(x, move)
        image = made if up else x
        if not self.shapes_only:
            self.activations.take(image.entries, self.channel % len(image.shape))
        return made

    def reshaped(self, x: Activation, shape: Sequence[int]) -> Activation:
        """Return the result in another shape, in which one extent may be -1."""
        whole = math.prod(x.shape)
        known = math.prod(extent for extent in shape if extent != -1)
        if list(shape).count(-1) > 1 or (-1 in shape and (not known or whole % known)):
            raise UntraceableError
        wanted = tuple(whole // known if extent == -1 else int(extent) for extent in shape)
        if math.prod(wanted) != whole:
            raise UntraceableError
        if wanted == x.shape:
            return x
        return Activation(wanted, lambda: x.entries.reshape(wanted))

    def joined(self, values: Sequence[Activation], axis: int) -> Activation:
        """Return results one after the other along an axis."""
        rank = len(values[0].shape)
        axis %= rank
        if any(len(each.shape) != rank for each in values):
            raise UntraceableError
        others = {each.shape[:axis] + each.shape[axis + 1 :] for each in values}
        if len(others) > 1:
            raise UntraceableError
        shape = list(values[0].shape)
        shape[axis] = sum(each.shape[axis] for each in values)
        images = all(each.is_image for each in values) and axis == self.channel % rank
        return Activation(
            shape, lambda: np.concatenate([each.entries for each in values], axis), is_image=images
        )

    def together(self, values: Sequence[Activation]) -> Activation:
        """Return what an operation entry by entry makes of results that are broadcast to one shape."""
        try:
            shape = np.broadcast_shapes(*(each.shape for each in values))
        except ValueError as error:
            raise UntraceableError from error
        same = [each for each in values if each.shape == shape]
        if not same:
            return self.fresh(shape)
        kept = next((each for each in same if each.is_image), same[0])
        for each in same:
            if each is not kept and not (each.is_image and kept.is_image) and not self.shapes_only:
                self.activations.link(kept.entries, each.entries)
        return kept

    # --- Layers -----------------------------------------------------------------------------------------

    def takes(self, weight: Path, x: Activation | Opaque, axis: int = -1) -> None:
        """Record what a layer takes along an axis."""
        self._record(weight, "takes", x, axis)

    def makes(self, weight: Path, made: Activation, axis: int = -1) -> None:
        """Record what a layer makes along an axis."""
        self._record(weight, "makes", made, axis)

    def _record(self, weight: Path, side: str, x: Activation | Opaque, axis: int) -> None:
        if self.shapes_only:
            return
        held = self.uses.setdefault(weight, {}).setdefault(side, [])
        if isinstance(x, Activation) and not (x.shape and x.entries.size):
            raise UntraceableError
        if isinstance(x, Opaque):
            held.append(None if x.features is None else x.features)
        else:
            rows = np.moveaxis(x.entries, axis, -1).reshape(-1, x.shape[axis])
            # The first place may be padding.
            whole = np.flatnonzero((rows >= 0).all(1))
            held.append(rows[whole[0] if len(whole) else 0])

    def dense(self, x: Activation | Opaque, weight: Path, sizes: tuple[int, int]) -> Activation | Opaque:
        """Return what a dense layer of these sizes, inputs and outputs, makes along the last axis."""
        if isinstance(x, Opaque):
            if x.features not in (None, sizes[0]):
                raise UntraceableError
            self.takes(weight, x)
            return Opaque(sizes[1])
        if not x.shape or x.shape[-1] != sizes[0]:
            raise UntraceableError
        self.takes(weight, x)
        made = self.fresh((*x.shape[:-1], sizes[1]))
        self.makes(weight, made)
        return made

    def normed(self, x: Activation | Opaque, weight: Path, axis: int) -> None:
        """Record what a norm or a PReLU with one number for each feature takes."""
        if isinstance(x, Activation) and not x.is_image:
            self.takes(weight, x, axis)

    def shape_of(self, path: Path) -> Shape:
        """Return the shape of a weight."""
        leaf = self.tree.get(path)
        if not isinstance(leaf, Leaf):
            raise UntraceableError
        return leaf.shape

    # --- Result -----------------------------------------------------------------------------------------

    def features(self) -> dict[Path, Features]:
        """Return the orders by weight, UNKNOWN where an operation on the way was not evaluated."""
        for weight, made in self._made:
            # Of most convolutions nothing asked for the entries.
            if made.is_numbered:
                self.makes(weight, made, self.channel % len(made.shape))
        self.activations.finish()
        found = {}
        for weight, sides in self.uses.items():
            orders = {side: self._order(calls) for side, calls in sides.items()}
            found[weight] = Features(orders.get("takes"), orders.get("makes"))
        return found

    def _order(self, calls: Sequence[Any]) -> Order | None:
        orders: list[Order | None] = []
        for each in calls:
            if isinstance(each, int):
                orders.append(None)
                continue
            known = None if each is None else self.activations.order(each)
            orders.append(UNKNOWN if known is None else known)
        if all(each is None for each in orders):
            return None
        return orders[0] if len(set(orders)) == 1 else UNKNOWN


def extents(
    sizes: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *,
    ceil: bool = False,
) -> tuple[int, ...]:
    """Return the extents that windows over an image leave; `padding` counts both ends together."""
    found = []
    for size, window, step, pad, wide in zip(sizes, kernel, stride, padding, dilation, strict=True):
        left = size + pad - wide * (window - 1) - 1
        if step < 1:
            raise UntraceableError
        found.append((-(-left // step) if ceil else left // step) + 1)
    return tuple(found)


def returning(entries: Any) -> Callable[[Any], Any]:
    """Return a function of one argument that returns these entries."""
    return lambda _: entries


# --- Checkpoints --------------------------------------------------------------------------------------


def recorded(checkpoint: Checkpoint, shapes: Sequence[Shape] = ()) -> Mapping[Path, Features]:
    """Return by weight what the file's own computation records, nothing where it has none.

    `shapes` are the target's inputs without the batch, which are tried where the file does not record those
    of the source.
    """
    from ckpttool.layouts import graph_orders, onnx_orders, script_orders

    try:
        for found in (
            script_orders.of_script(checkpoint, shapes),
            graph_orders.of_saved_model(checkpoint),
            onnx_orders.of_onnx(checkpoint),
        ):
            if found is not None:
                return found
    except (
        CkpttoolError,
        UntraceableError,
        TooLargeError,
        SyntaxError,
        ArithmeticError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
        MemoryError,
    ):
        return {}
    return {}


def with_orders(
    tree: Tree,
    checkpoint: Checkpoint,
    shapes: Sequence[Shape] = (),
    *,
    sources: Mapping[Path, Path] | None = None,
    unknown: bool = True,
) -> Tree:
    """Return a checkpoint's tree, or one of its leaves, with the orders that its own computation records.

    `sources` are the paths in the checkpoint of leaves that were made of its own. Without `unknown`, an order
    that cannot be evaluated counts as one that nothing records.
    """
    found = recorded(checkpoint, shapes)
    if not found:
        return tree
    whole = checkpoint.tree
    # A leaf keeps its identity under whatever path a preparation puts it.
    own = {id(whole[path]): each for path, each in found.items() if path in whole}
    leaves: dict[Path, Leaf | ValueLeaf] = {}
    for path, leaf in tree.items():
        each = own.get(id(leaf)) if sources is None else found.get(sources.get(path, ()))
        if each is not None and isinstance(leaf, Leaf):
            each = each if unknown else Features(*(None if side == UNKNOWN else side for side in each))
            leaf = replace(leaf, features=each)
        leaves[path] = leaf
    return Tree(leaves, tree.aliases, tree.containers)
