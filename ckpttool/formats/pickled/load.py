"""A pickled file as inert data, NumPy's arrays left where they are in the file."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from ckpttool.errors import FormatError, UnsupportedError
from ckpttool.source import File, Inline, Source, Span
from ckpttool.wire import npy, pickle_numpy, pickle_reader
from ckpttool.wire.asked import Asked
from ckpttool.wire.pickle_numpy import Parts, Type
from ckpttool.wire.pickle_reader import CONTAINERS, Builder, Object, Stored

# Shorter arrays are kept in the tree: a span would take as much memory.
_INLINE = 64


def _scalar(args: tuple[Any, ...]) -> object:
    """Keep a NumPy scalar's type: it is an array without dimensions (variables of rank 0 come as such)."""
    kind, data = pickle_numpy.scalar_parts(args)
    known = isinstance(kind, Type) and kind.name is not None
    return pickle_numpy.made(1, (), kind, False, data) if known else NotImplemented


def _jax_array(args: tuple[Any, ...]) -> object:
    """Return the array that JAX rebuilds: how NumPy would, from the same four parts, and facts of its own."""
    return pickle_numpy.made(*args[2]) if len(args) == 4 and type(args[2]) is tuple else NotImplemented


def _set_state(args: tuple[Any, ...]) -> object:
    """Attach what cloudpickle sets on a function or class by a call whose result the pickle drops."""
    if len(args) == 2 and isinstance(args[0], Object) and args[0].state is None:
        args[0].state = args[1]
    return NotImplemented


BUILDERS: Mapping[str, Builder] = {
    **CONTAINERS,
    **pickle_numpy.BUILDERS,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
    # jax/_src/array.py, ArrayImpl.__reduce__
    "jax._src.array._reconstruct_array": _jax_array,
    # cloudpickle/cloudpickle.py, _dynamic_function_reduce; RLlib has its own copy of it.
    **{
        f"{home}.{name}": _set_state
        for home in (
            "cloudpickle.cloudpickle",
            "cloudpickle.cloudpickle_fast",
            "ray.cloudpickle.cloudpickle",
            "ray.cloudpickle.cloudpickle_fast",
        )
        for name in ("_function_setstate", "_class_setstate")
    },
}


class Pickled(NamedTuple):
    """A pickle's value and where the pickle lies; `file` is None if it lies in no file as it is.

    `asked` is what unpickling would import and call; whoever lists the value tells of it.
    """

    value: Any
    size: int
    file: File | None
    base: int
    asked: tuple[Asked, ...] = ()


def load_file(file: File, more: Mapping[str, Builder] = MappingProxyType({})) -> Pickled:
    """Return the value of a file that is one pickle; the file's bytes are read once, arrays not copied.

    `more` are builders of calls beside those of plain data and NumPy.
    """
    data = file.read(0, file.size)
    try:
        return load(data, file, builders={**BUILDERS, **more})
    except FormatError as error:
        if b"joblib.numpy_pickle" in data[: 1 << 16]:
            raise UnsupportedError(
                "this is a joblib file, whose arrays stand outside of its pickle",
                file=file.path,
                hint="where you trust it, joblib.load reads it in Python, and numpy.savez writes its arrays",
            ) from error
        raise


def load(
    data: bytes,
    file: File | None,
    base: int = 0,
    *,
    name: str | None = None,
    builders: Mapping[str, Builder] = BUILDERS,
) -> Pickled:
    """Return the value of a pickle that begins at byte `base` of `file`, or of no file (it was encoded).

    Raise FormatError, naming the file (`name` where there is no `file`), when the pickle is damaged.
    """
    inline = _INLINE if file else sys.maxsize
    path = file.path if file else name
    try:
        found = pickle_reader.read(data, builders=builders, inline=inline, file=path, base=base)
    except FormatError as error:
        if file is None:
            # An offset into what the file encodes would name the wrong byte of the file.
            error.offset = None
        raise
    asked = found.asked if file else tuple(replace(each, offset=None) for each in found.asked)
    return Pickled(found.value, len(data), file, base, asked)


def array_source(parts: Parts, pickled: Pickled) -> Source:
    """Return where the array's bytes are, in C order and little-endian; its type must have a name of ours."""
    data = parts.data
    if isinstance(data, Stored) and pickled.file is not None:
        body: Span | Inline = Span(pickled.file, pickled.base + data.at, data.length)
    else:
        body = Inline(bytes(data))
    return npy.laid_out(body, parts.type.code, parts.shape, fortran=parts.fortran, big=parts.type.big)
