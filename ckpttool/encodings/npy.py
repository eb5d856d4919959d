"""Read NumPy's .npy arrays and .npz archives: headers are parsed as data, arrays stay unread.

Source: numpy/lib/format.py (the docstring describes versions 1.0 to 3.0; `_write_array_header`,
`_read_array_header`), numpy/lib/npyio.py (`savez`: a zip of `NAME.npy` members). NumPy evaluates
the header as a Python literal; here it may consist only of text, truth values, whole numbers and
brackets.
"""

from __future__ import annotations

import ast
import math
import re
import zlib
from collections.abc import Iterable, Mapping
from typing import NoReturn

from ckpttool.core import deferred, limits
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.dtypes import dtype_name
from ckpttool.core.errors import FormatError, TruncatedError
from ckpttool.core.source import DeflatedSpan, Inline, Shape, Source, Span, Storage, StoragePart, StridedView
from ckpttool.encodings.archives import ZipArchive

MAGIC = b"\x93NUMPY"
SUFFIX = ".npy"
RANK = 64
_LARGEST_COUNT = (1 << 63) - 1
_FIRST = 1024
# More than the code tables before a deflated block's first byte.
_TABLES = 4096
_TEXT = r"(?:'[^'\\]*'|\"[^\"\\]*\")"
# White space that Python accepts between the parts of a literal; other ASCII space is an error there.
_SPACE = " \t\n\r\f"
# What a literal may consist of, which the parser of Python reads without deep recursion. The group is atomic:
# a part is never divided in another way, which would take exponential time.
_LITERAL = deferred.compile(
    rf"(?>{_TEXT}|True|False|None|-?(?:0|[1-9]\d{{0,19}})L?|[][(){{}},:]|[{_SPACE}]+)*", re.ASCII
)
_LONG = deferred.compile(rf"({_TEXT})|(\d)L")
_ENTRIES = {"descr", "fortran_order", "shape"}
# Fixed-width text and bytes: bytes per unit of the width in NumPy's type name.
_WIDE = {"U": 4, "S": 1, "V": 1}
# numpy/lib/_format_impl.py: room for the first axis to grow, and the alignment of an array's bytes.
_GROWTH, _ALIGNED = 21, 64


class NpyArray(NamedTuple):
    """One array: `dtype` is None for objects, text, dates, structured types and bytes without a type.

    `descr` is NumPy's name of the type ("<f4", "|O", "structured"). `source` is None without a
    `dtype`, except for fixed-width text and bytes (U, S, V), whose elements it returns as stored.
    """

    descr: str
    shape: Shape
    dtype: str | None
    source: Source | None


def read_npy(storage: Storage) -> NpyArray:
    """Return the array of an .npy file or member, with its bytes unread.

    Raise FormatError if the header breaks NumPy's rules or does not match the number of bytes.
    """
    descr, fortran, shape, start = _read_header(storage)
    if descr is None:
        return NpyArray("structured", shape, None, None)
    order, code = (descr[:1], descr[1:]) if descr[:1] in "<>|=" else ("=", descr)
    dtype = dtype_name(code)
    item = 0 if dtype is None and code[:1] not in _WIDE else _item_width(code)
    if not item:
        return NpyArray(descr, shape, None, None)
    nbytes = item
    for extent in shape:
        nbytes *= extent
    size = storage.length - start
    if nbytes != size:
        wrong = TruncatedError if size < nbytes else FormatError
        raise _npy_error(
            wrong,
            storage,
            "an array's size in bytes does not match its shape",
            expected=f"{nbytes:,} bytes",
            description=f"{size:,}",
        )
    body = StoragePart(storage, start, nbytes) if nbytes else Inline(b"")
    # Types without a byte order in NumPy are not swapped.
    big = order == ">" and code[0] not in "SV"
    source = npy_source(body, code, shape, fortran=fortran, big=big)
    return NpyArray(descr, shape, dtype, source)


def _item_width(code: str) -> int:
    """Return the size of an element of type `code` ("f4": 4, "U3": 12); 0 if the name does not define it."""
    if not re.fullmatch(r"[a-zA-Z]\d{1,9}", code, re.ASCII):
        return 0
    return int(code[1:]) * _WIDE.get(code[0], 1)


def list_npz(archive: ZipArchive, names: Iterable[str] | None = None) -> Mapping[str, NpyArray]:
    """Return an .npz archive's arrays by name, without `.npy`, in archive order.

    `names` are the members to read, by default all. Raise FormatError for a member that is not an
    array and for duplicate names.
    """
    arrays: dict[str, NpyArray] = {}
    for member in archive.members if names is None else names:
        name = member.removesuffix(SUFFIX)
        if name in arrays:
            raise FormatError(f"two arrays are named {name!r}", file=archive.file.path)
        try:
            storage = archive.source(member)
            arrays[name] = read_npy(storage)
            if _is_header_only(arrays[name]):
                _verify(storage)
        except FormatError as error:
            raise error.located(path=name) from error.__cause__
    return arrays


def is_npy_member(archive: ZipArchive, member: str) -> bool:
    """Return whether a member begins with an array header."""
    return _read_prefix(archive.source(member), len(MAGIC)) == MAGIC


def _is_header_only(array: NpyArray) -> bool:
    """Return whether only the header of a member is used, so no read verifies its checksum.

    This includes a type without a name of ours: "<f4" is one flipped bit away from "<V4".
    """
    return array.source is None or array.dtype is None or 0 in array.shape


def _verify(storage: Storage) -> None:
    if isinstance(storage, Span):
        for _ in storage.pieces():
            pass
    else:
        storage.read()


def encode_npy_header(descr: str, shape: Shape) -> bytes:
    """Return the header of an array in C order, as NumPy writes it (`_write_array_header`)."""
    extents = f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {extents}, }}"
    if shape:
        text += " " * (_GROWTH - len(str(shape[0])))
    # Version 1 stores the header length in two bytes, version 2 in four.
    start = len(MAGIC) + (4 if len(text) + _ALIGNED < 1 << 16 else 6)
    text += " " * (-(start + len(text) + 1) % _ALIGNED) + "\n"
    width = start - len(MAGIC) - 2
    return MAGIC + bytes((width // 2, 0)) + len(text).to_bytes(width, "little") + text.encode("ascii")


def npy_source(
    body: StoragePart | Span | Inline, code: str, shape: Shape, *, fortran: bool, big: bool
) -> Source:
    """Return an array's bytes in C order, little-endian.

    Args:
        body: the stored elements, without the header.
        code: NumPy's type code ("f4"), whose number is the element size.
        shape: the array's shape.
        fortran: the first index varies fastest in the stored order.
        big: the stored elements are big-endian.
    """
    item = _item_width(code)
    # A complex number is two separately swapped halves, a text as many as it has characters.
    width = ({"c": item // 2, "U": 4}.get(code[0], item)) if big else 0
    if width <= 1 and (not fortran or len(shape) < 2):
        return body
    strides, step = [], 1
    for extent in shape if fortran else reversed(shape):
        strides.append(step)
        step *= max(1, extent)
    return StridedView(body, item, shape, tuple(strides if fortran else reversed(strides)), 0, width)


def _npy_error(
    kind: type[FormatError],
    storage: Storage,
    message: str,
    *,
    expected: str | None = None,
    description: str | None = None,
) -> FormatError:
    span = storage.base if isinstance(storage, DeflatedSpan) else storage
    return kind(message, file=span.file.path, offset=span.offset, expected=expected, found=description)


def _read_prefix(storage: Storage, count: int) -> bytes:
    """Return the first bytes without reading, or decompressing, the rest."""
    if isinstance(storage, Span):
        return storage.file.read(storage.offset, min(count, storage.length))
    packed = storage.base.file.read(storage.base.offset, min(count + _TABLES, storage.base.length))
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, count)
    except zlib.error as error:
        message = f"a compressed member cannot be decompressed: {error}"
        raise _npy_error(FormatError, storage, message) from error


def _read_header(storage: Storage) -> tuple[str | None, bool, Shape, int]:
    """Return an array's type, None if it is structured, its order and shape, and the length of the header."""
    data = _read_prefix(storage, _FIRST)
    if len(data) < len(MAGIC) + 4 or not data.startswith(MAGIC):
        _fail(storage, "an array does not start with NumPy's magic bytes", data[:8])
    version, minor = data[6], data[7]
    if version not in (1, 2, 3) or minor:
        _fail(storage, f"unknown NumPy array format version {version}.{minor}", b"")
    start = 10 if version == 1 else 12
    length = int.from_bytes(data[8:start], "little")
    # A shorter header is already in memory; this matters for files with many arrays.
    if length > _FIRST and length > limits.current().array_header_bytes:
        span = storage.base if isinstance(storage, DeflatedSpan) else storage
        what = "an array's header is too long"
        raise limits.limit_error("array_header_bytes", what, length, file=span.file.path, offset=span.offset)
    if start + length > len(data):
        data = _read_prefix(storage, start + length)
    raw = data[start : start + length]
    if len(raw) < length:
        raise _npy_error(TruncatedError, storage, "an array is truncated in its header")
    try:
        text = raw.decode("utf-8" if version == 3 else "latin-1")
    except UnicodeDecodeError:
        _fail(storage, "an array's header is not UTF-8", raw)
    # NumPy removes the L of Python 2's integers in the versions that Python 2 wrote.
    literal = _LONG.sub(lambda match: match[1] or match[2], text) if version < 3 else text
    entries = _parse_entries(storage, text, literal)
    descr, fortran = entries["descr"], entries["fortran_order"]
    if not isinstance(descr, str | list | tuple):
        _fail(storage, "an array's type is not one that NumPy writes", text)
    if not isinstance(fortran, bool):
        _fail(storage, "an array's fortran_order is neither True nor False", text)
    shape = _require_shape(storage, entries["shape"])
    return descr if isinstance(descr, str) else None, fortran, shape, start + length


def _fail(storage: Storage, message: str, shown: bytes | str) -> NoReturn:
    raise _npy_error(FormatError, storage, message, description=repr(shown[:60]) if shown else None)


def _parse_entries(storage: Storage, text: str, literal: str) -> dict[str, object]:
    """Return the three entries of the header dict, in any order; others are an error."""
    if _LITERAL.fullmatch(text) is None:
        _fail(storage, "an array's header is not a literal that NumPy writes", text)
    try:
        tree = ast.parse(literal.strip(_SPACE), mode="eval").body
        value = ast.literal_eval(tree)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        _fail(storage, "an array's header is not a literal that NumPy writes", text)
    if not isinstance(tree, ast.Dict) or value.keys() != _ENTRIES or len(tree.keys) != len(_ENTRIES):
        _fail(storage, "an array's header is not a dict of descr, fortran_order and shape", text)
    entries: dict[str, object] = value
    return entries


def _require_shape(storage: Storage, shape: object) -> Shape:
    if not isinstance(shape, tuple) or not all(type(extent) is int and extent >= 0 for extent in shape):
        _fail(storage, "an array's shape is not a tuple of sizes", repr(shape))
    if len(shape) > RANK:
        _fail(storage, f"an array has {len(shape):,} dimensions", "")
    # Zeros are left out, as in numpy: a zero must not hide an impossible size.
    if math.prod(extent or 1 for extent in shape) > _LARGEST_COUNT:
        _fail(storage, "an array has too many elements to count", repr(shape))
    return shape
