"""Recurrent cells, one layer in one direction each: LSTM, GRU, simple RNN.

Canonical are Keras's order of gates (LSTM i, f, g, o; GRU z, r, h), a kernel [in, gates * units], a recurrent
kernel [units, gates * units] and two biases, which a GRU must keep apart and an LSTM adds.

Sources: keras/src/layers/rnn/lstm.py, gru.py, simple_rnn.py; tf_keras/src/saving/legacy/hdf5_format.py
(_convert_rnn_weights: the cuDNN forms); sonnet/src/recurrent.py; stable_baselines/common/tf_layers.py (lstm);
torch/nn/modules/rnn.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from ckpttool.leaf import Leaf
from ckpttool.mapping.kinds.kind import Group, Kind, Row, Told, Way, Weight, require
from ckpttool.mapping.parts import Blocks, Take, Term, filled
from ckpttool.mapping.rules import KEEP, TRANSPOSE, Permute, Reshape, Rule, chained
from ckpttool.source import Inline, Shape

KERNELS = ("kernel", "recurrent_kernel")
BIASES = ("bias_input", "bias_recurrent")
_GATES = {"lstm": 4, "gru": 3, "simple_rnn": 1}


class _Form(NamedTuple):
    """How a cell is spelled: its kernels and biases by name, the order of its gates, how it keeps its biases.

    `order` makes canonical blocks of stored ones. Biases are one that stands for both, two in a row ("long",
    cuDNN's), two rows ("rows"), or two tensors ("apart").
    """

    kind: str
    framework: str
    names: tuple[str, ...]
    biases: Literal["one", "long", "rows", "apart"]
    form: str = ""
    order: tuple[int, ...] = ()

    def record(self) -> Kind:
        """Return the form as a kind."""
        rank = 2 if self.biases == "rows" else 1
        weights = (
            *(Weight(name, canonical, 2) for name, canonical in zip(self.names, KERNELS, strict=False)),
            *(Weight(name, BIASES[0], rank, optional=self.biases != "long") for name in self.names[2:]),
        )
        return Kind(
            self.kind,
            self.framework,
            weights,
            self.form,
            also=self.fits,
            reading=self.read,
            writing=self.write,
        )

    def fits(self, group: Group) -> bool:
        """Say whether the shapes are those of a cell: gates times units, and biases of that length."""
        kernel, recurrent = (self._canonical(group[name].shape) for name in self.names[:2])
        biases = [group[name].shape for name in self.names[2:] if name in group]
        units, width = recurrent
        return (
            width == _GATES[self.kind] * units
            and kernel[1] == width
            and all(shape == self._length(width) for shape in biases)
            and len(biases) in (0, len(self.names) - 2)
        )

    def read(self, group: Group, told: Told) -> Way:  # noqa: ARG002  # as every reading
        """Return the way of a cell's tensors to canonical ones."""
        kernels = [self._canonical(group[name].shape) for name in self.names[:2]]
        rows = list(self._kernels(*kernels))
        if self.names[2] in group:
            rows += self._biases(kernels[0][1])
        return Way(tuple(rows))

    def write(self, canonical: Group, told: Told) -> Way:
        """Return the way of canonical tensors to a cell's; a bias that nobody gives is 0."""
        require(self.record(), canonical, KERNELS)
        kernels = [canonical[name].shape for name in KERNELS]
        rows = [
            Row(
                row.stored, row.canonical, row.rule.inverse(like(canonical["kernel"], self._canonical(shape)))
            )
            for row, shape in zip(self._kernels(*kernels), kernels, strict=True)
        ]
        given = [name for name in BIASES if name in canonical]
        width = kernels[0][1]
        if not given:
            zeros = filled(canonical["kernel"].dtype, self._length(width), 0.0)
            wanted = [name for name in self.names[2:] if name in told.wanted]
            return Way(tuple(rows), dict.fromkeys(wanted, zeros))
        if self.biases == "one":
            back = self._reordered(0).inverse(canonical[given[0]])
            whole = (back,) if len(given) == 1 else (back, Term(len(given)))
            return Way((*rows, *(Row(self.names[2], name, chained(*whole)) for name in given)))
        fills: dict[str, Leaf] = {}
        for row in self._biases(width):
            back = row.rule.inverse(like(canonical["kernel"], self._length(width)))
            if row.canonical in given:
                rows.append(Row(row.stored, row.canonical, back))
            else:
                fills |= fill(row.stored, back, filled(canonical["kernel"].dtype, (width,), 0.0))
        return Way(tuple(rows), fills)

    def _canonical(self, shape: Shape) -> Shape:
        return shape if self.framework == "tensorflow" else shape[::-1]

    def _length(self, width: int) -> Shape:
        return {"long": (2 * width,), "rows": (2, width)}.get(self.biases, (width,))

    def _reordered(self, axis: int) -> Rule:
        return Blocks(axis, self.order) if self.order else KEEP

    def _kernels(self, kernel: Shape, recurrent: Shape) -> Iterator[Row]:
        """Go through the ways to the canonical kernels, which have these shapes."""
        turned: Rule = KEEP if self.framework == "tensorflow" else TRANSPOSE
        gates = _GATES[self.kind]
        rules = (turned, turned)
        if self.biases == "long":
            rules = _input_of_cudnn(kernel[0], gates, recurrent[0]), _recurrent_of_cudnn(gates, recurrent[0])
        for name, canonical, rule in zip(self.names, KERNELS, rules, strict=False):
            yield Row(name, canonical, chained(rule, self._reordered(1)))

    def _biases(self, width: int) -> tuple[Row, ...]:
        """Return the ways of stored biases to canonical ones of a length."""
        cuts: tuple[Rule, ...] = (KEEP, KEEP)
        if self.biases == "long":
            cuts = Take(0, 0, width, 2 * width), Take(0, width, 2 * width, 2 * width)
        elif self.biases == "rows":
            cuts = tuple(chained(Take(0, n, n + 1, 2), Reshape((width,))) for n in (0, 1))
        names = (self.names[2], self.names[-1])
        rows = zip(names, BIASES, cuts, strict=True)
        found = tuple(Row(name, canonical, chained(cut, self._reordered(0))) for name, canonical, cut in rows)
        return found[:1] if self.biases == "one" else found


def _input_of_cudnn(inputs: int, gates: int, units: int) -> Rule:
    """Return the rule of cuDNN's input kernel: of each gate the elements of [units, in] in [in, units]."""
    return chained(
        Reshape((inputs, gates, units)),
        Permute((1, 0, 2)),
        Reshape((gates, units, inputs)),
        Permute((2, 0, 1)),
        Reshape((inputs, gates * units)),
    )


def _recurrent_of_cudnn(gates: int, units: int) -> Rule:
    """Return the rule of cuDNN's recurrent kernel: that of each gate is transposed."""
    return chained(Reshape((units, gates, units)), Permute((2, 1, 0)), Reshape((units, gates * units)))


def like(leaf: Leaf, shape: Shape) -> Leaf:
    """Return a leaf of another shape to ask a rule for its inverse; it has no bytes."""
    return Leaf(leaf.dtype, shape, Inline(b""), "")


def fill(name: str, rule: Rule, leaf: Leaf) -> dict[str, Leaf]:
    """Return what a rule makes of a leaf, under a name."""
    made = rule.leaf(leaf)
    return {name: made} if isinstance(made, Leaf) else {}


_KERAS = ("kernel", "recurrent_kernel", "bias")
_TORCH = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
# Keras's z, r, h and torch's r, z, n: the first two change places.
_ZR = (1, 0, 2)
KINDS: tuple[Kind, ...] = tuple(
    form.record()
    for form in (
        _Form("lstm", "tensorflow", _KERAS, "one"),
        _Form("lstm", "tensorflow", _KERAS, "long", "cudnn"),
        _Form("lstm", "tensorflow", ("w_i", "w_h", "b"), "one", "sonnet"),
        _Form("lstm", "tensorflow", ("wx", "wh", "b"), "one", "baselines", (0, 1, 3, 2)),
        _Form("lstm", "torch", _TORCH, "apart"),
        _Form("gru", "tensorflow", _KERAS, "rows"),
        _Form("gru", "tensorflow", _KERAS, "long", "cudnn"),
        _Form("gru", "torch", _TORCH, "apart", order=_ZR),
        _Form("simple_rnn", "tensorflow", _KERAS, "one"),
        _Form("simple_rnn", "torch", _TORCH, "apart"),
    )
)
