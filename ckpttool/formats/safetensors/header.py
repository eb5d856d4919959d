"""A safetensors header, every rule of the format checked, in time that grows with its length.

Sources: github.com/huggingface/safetensors, README.md ("Format") and safetensors/src/tensor.rs
(`SafeTensors::read_metadata`, `Metadata::validate`, `Dtype`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from ckpttool import documents, dtypes, limits
from ckpttool.errors import CkpttoolError, FormatError, TruncatedError
from ckpttool.formats.safetensors import LENGTH
from ckpttool.source import File, Shape

METADATA = "__metadata__"
# NumPy's limit, and more than any framework's.
RANK = 64
_LARGEST_COUNT = (1 << 63) - 1
_ONLY_INT = frozenset((int,))
_FIELDS = {"dtype", "shape", "data_offsets"}

# Elements smaller than a byte, which no array library holds (tensor.rs, Dtype::bitsize): bits.
PACKED = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


class Entry(NamedTuple):
    """One tensor: `code` is the format's name of its type, `offset` counts from the file's beginning."""

    code: str
    shape: Shape
    offset: int
    nbytes: int


class Header(NamedTuple):
    """What stands before the tensors' bytes: entries by name, in the order of the text, and the metadata."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]


def read(file: File) -> Header:
    """Return the header of a file; raise FormatError when it breaks a rule, or the tensors leave a gap."""
    text = _text(file)
    try:
        found = documents.strict(text, "the header", "header_bytes")
    except CkpttoolError as error:
        error.offset = LENGTH
        raise error.located(file=file.path) from error.__cause__
    metadata = found.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        _fail(file, "the metadata are not texts by name")
    start = LENGTH + len(text)
    entries = {name: _entry(file, name, fields, start) for name, fields in found.items()}
    _require_dense(file, entries, start)
    return Header(entries, metadata)


def _text(file: File) -> bytes:
    if file.size < LENGTH:
        raise TruncatedError(
            "the file ends in its header's length",
            file=file.path,
            expected=f"{LENGTH} bytes",
            found=f"{file.size}",
        )
    size = int.from_bytes(file.read(0, LENGTH), "little")
    if not 2 <= size <= file.size - LENGTH:
        raise (FormatError if size < 2 else TruncatedError)(
            "the header cannot be as long as the file says",
            file=file.path,
            offset=0,
            expected=f"2 to {file.size - LENGTH:,} bytes",
            found=f"{size:,}",
        )
    if size > limits.current().header_bytes:
        raise limits.exceeded("header_bytes", "the header is too long", size, file=file.path, offset=0)
    text = file.read(LENGTH, size)
    if text[:1] != b"{":
        _fail(file, "the header does not begin with {", repr(text[:8]))
    return text


def _fail(file: File, message: str, found: str | None = None) -> NoReturn:
    raise FormatError(message, file=file.path, offset=LENGTH, found=found)


def _entry(file: File, name: str, fields: Any, start: int) -> Entry:
    if not isinstance(fields, dict) or not fields.keys() >= _FIELDS:
        _wrong(file, name, "is not described by dtype, shape and data_offsets")
    code, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(code, str):
        _wrong(file, name, "has a type that is no text")
    if not isinstance(shape, list) or not set(map(type, shape)) <= _ONLY_INT or (shape and min(shape) < 0):
        _wrong(file, name, "has a shape that is not made of sizes")
    if len(shape) > RANK:
        _wrong(file, name, f"has {len(shape):,} dimensions")
    if not isinstance(offsets, list) or len(offsets) != 2 or not set(map(type, offsets)) <= _ONLY_INT:
        _wrong(file, name, "has data_offsets that are no pair of offsets")
    begin, end = offsets
    if not 0 <= begin <= end <= file.size - start:
        if 0 <= begin <= end <= _LARGEST_COUNT:
            raise TruncatedError(
                "the file ends before a tensor does",
                file=file.path,
                path=repr(name[:200]),
                offset=start + begin,
                expected=f"{end - begin:,} bytes",
                found=f"{max(0, file.size - start - begin):,}",
            )
        _wrong(file, name, "has data_offsets that cannot be")
    _require_size(file, name, code, shape, end - begin)
    return Entry(code, tuple(shape), start + begin, end - begin)


def _require_size(file: File, name: str, code: str, shape: list[int], nbytes: int) -> None:
    count, zero = 1, False
    for extent in shape:
        # Zeros are left out: one must not hide a size that cannot be.
        zero = zero or not extent
        count *= extent or 1
    bits = PACKED.get(code) or (
        8 * dtypes.BY_SAFETENSORS[code].itemsize if code in dtypes.BY_SAFETENSORS else 0
    )
    if count > _LARGEST_COUNT or count * bits > 8 * _LARGEST_COUNT:
        _wrong(file, name, "has more elements than can be counted")
    needed = 0 if zero else count * bits
    if bits and needed != 8 * nbytes:
        raise FormatError(
            "a tensor's bytes do not fill its shape",
            file=file.path,
            path=repr(name[:200]),
            expected=f"{needed / 8:,g} bytes" if needed % 8 else f"{needed // 8:,} bytes",
            found=f"{nbytes:,}",
        )


def _wrong(file: File, name: str, what: str) -> NoReturn:
    _fail(file, f"tensor {name[:200]!r} {what}")


def _require_dense(file: File, entries: Mapping[str, Entry], start: int) -> None:
    """Raise unless the tensors follow each other without gap or overlap to the end of the file."""
    free = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != free:
            what = "overlaps another" if entry.offset < free else "is preceded by bytes of no tensor"
            raise FormatError(f"a tensor {what}", file=file.path, path=repr(name[:200]), offset=entry.offset)
        free += entry.nbytes
    if free != file.size:
        raise FormatError("the last tensor is followed by bytes of no tensor", file=file.path, offset=free)
