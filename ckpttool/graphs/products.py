"""Operators that multiply matrices: products, sums of products by index, determinants."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ckpttool.core.dtypes import np
from ckpttool.core.source import Shape
from ckpttool.graphs.operators import OperatorCall, OperatorNames, broadcast_shapes, operator


def matrix_product_shape(one: Shape, two: Shape) -> Shape:
    """Return the shape of a matrix product with broadcast leading axes; raise ValueError if it has none."""
    rows, columns = one if len(one) > 1 else (1, *one), two if len(two) > 1 else (*two, 1)
    if not one or not two or rows[-1] != columns[-2]:
        raise ValueError(one, two)
    lead = broadcast_shapes(rows[:-2], columns[:-2])
    return (*lead, *rows[-2:-1][: len(one) > 1], *columns[-1:][: len(two) > 1])


def matmul_shape(call: OperatorCall, right: int = 1) -> Sequence[Shape]:
    """Return the shape of the product of the first input and the one with the number `right`."""
    return [matrix_product_shape(call.shape(0), call.shape(right))]


def matmul_macs(call: OperatorCall, outputs: Sequence[Shape]) -> int:
    """Return the multiply-accumulate operations of a product with the first input on its left."""
    return math.prod(outputs[0]) * call.shape(0)[-1]


@operator(
    "MatMul",
    shapes=matmul_shape,
    macs=matmul_macs,
    kind="product",
    spelling=OperatorNames(2, keras="Matmul"),
)
def _matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    # Products of types that ml_dtypes adds are float32.
    return np.asarray(np.matmul(a, b)).astype(a.dtype)


def _gemm_shape(call: OperatorCall) -> Sequence[Shape]:
    one, two = call.shape(0), call.shape(1)
    if len(one) != 2 or len(two) != 2:
        raise ValueError(one, two)
    rows = one[::-1] if call.get("transA") else one
    columns = two[::-1] if call.get("transB") else two
    return [matrix_product_shape(rows, columns)]


def _gemm_macs(call: OperatorCall, outputs: Sequence[Shape]) -> int:
    return math.prod(outputs[0]) * call.shape(0)[0 if call.get("transA") else 1]


def _expand_gemm(add: Callable[..., str], number: Callable[..., str], *names: str, **settings: float) -> str:
    """Add a product of matrices, with factors only if they are not 1."""

    def scaled(name: str, factor: str) -> str:
        value = settings[factor]
        return name if value == 1 else add("Mul", name, number(value))

    a, b = (
        add("Transpose", name, perm=(1, 0)) if settings[turned] else name
        for name, turned in zip(names, ("transa", "transb"), strict=False)
    )
    product = add("MatMul", a, scaled(b, "alpha"))
    return add("Add", product, scaled(names[2], "beta")) if names[2:] and names[2] else product


@operator("Gemm", shapes=_gemm_shape, macs=_gemm_macs, kind="product", expand=_expand_gemm)
def _gemm(
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transa: int = 0,
    transb: int = 0,
) -> np.ndarray:
    product = (a.T if transa else a) @ (b.T if transb else b)
    if alpha != 1.0:
        product = (alpha * product).astype(a.dtype)
    if c is None:
        return np.asarray(product).astype(a.dtype)
    added = c if beta == 1.0 else beta * c
    return np.broadcast_to(product + added, product.shape).astype(a.dtype)


def _einsum_terms(equation: str, shapes: Sequence[Shape]) -> tuple[list[str], str, dict[str, int]]:
    """Return the letters of the operands and of the result, and the extent of each letter.

    Axes of an ellipsis get letters that no equation uses.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms, spare = left.split(","), [chr(code) for code in range(0x100, 0x200)]
    if len(terms) != len(shapes):
        raise ValueError(equation)
    most = max((len(s) - len(t) + 3 for t, s in zip(terms, shapes, strict=True) if "..." in t), default=0)
    dots = "".join(spare[:most])
    counts = [len(shape) - len(term) + 3 for term, shape in zip(terms, shapes, strict=True)]
    named = [t.replace("...", dots[most - n :] if n else "") for t, n in zip(terms, counts, strict=True)]
    extents: dict[str, int] = {}
    for term, shape in zip(named, shapes, strict=True):
        for letter, extent in zip(term, shape, strict=True):
            if extents.get(letter, 1) not in (1, extent) and extent != 1:
                raise ValueError(equation)
            extents[letter] = max(extents.get(letter, 1), extent)
    if not arrow:
        letters = "".join(term.replace("...", "") for term in terms)
        right = "..." * bool(most) + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    return named, right.replace("...", dots), extents


def _einsum_shape(call: OperatorCall) -> Sequence[Shape]:
    shapes = [call.shape(n) for n in range(len(call.shapes))]
    _, result, extents = _einsum_terms(call.get("equation"), shapes)
    return [tuple(extents[letter] for letter in result)]


def _einsum_macs(call: OperatorCall, outputs: Sequence[Shape]) -> int:  # noqa: ARG001  # as of any operator
    shapes = [call.shape(n) for n in range(len(call.shapes))]
    _, _, extents = _einsum_terms(call.get("equation"), shapes)
    return math.prod(extents.values()) if len(shapes) > 1 else 0


@operator("Einsum", shapes=_einsum_shape, macs=_einsum_macs, kind="equation")
def _einsum(*arrays: np.ndarray, equation: str = "") -> np.ndarray:
    terms, result, _ = _einsum_terms(equation, [array.shape for array in arrays])
    letters = sorted({letter for term in terms for letter in term})
    numbers = [[letters.index(letter) for letter in term] for term in terms]
    # numpy does not sum products of types that ml_dtypes adds.
    known = [array.astype(np.float32) if array.dtype.kind == "V" else array for array in arrays]
    operands: list[Any] = [part for pair in zip(known, numbers, strict=True) for part in pair]
    return np.asarray(np.einsum(*operands, [letters.index(letter) for letter in result])).astype(
        arrays[0].dtype
    )


@operator(
    "Det", shapes=lambda call: [call.shape(0)[:-2]], spelling=OperatorNames(1, tensorflow="MatrixDeterminant")
)
def _determinant(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.linalg.det(x)).astype(x.dtype)
