"""`textconv`: a checkpoint file as lines for `git diff`, from the bytes of this file only."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator

from ckpttool.core import code_references
from ckpttool.core.atomic_write import WorkerThread
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.digests import DigestRecorder
from ckpttool.core.dtypes import np
from ckpttool.core.errors import CkpttoolError, UsageError
from ckpttool.core.source import Checksum, Span, keep_open
from ckpttool.core.text import format_count, natural_sort_key
from ckpttool.core.tree import Leaf, Path, Record, ValueLeaf
from ckpttool.formats import tf_common, tf_object_graph
from ckpttool.formats.detect import open_checkpoint
from ckpttool.formats.tf_common import SlicedTensor
from ckpttool.libraries.recognize import recognize_checkpoint
from ckpttool.verification import moments
from ckpttool.verification.array_differences import read_values

# Digits of a digest to show: among a million tensors, two share them once in five hundred cases.
_DIGITS = 12
# Longer texts are shown by length and digest.
_LONGEST = 200
# Up to this many values, a tensor is shown by its values instead of its statistics.
_FEW = 4
_SUFFIX = tf_object_graph.MARK + tf_object_graph.VALUE
# Maximum size of a text that is shown unchanged, in bytes.
_LONGEST_FILE = 1 << 20


@keep_open()
def textconv(file: str) -> tuple[str, ...]:
    """Return the text form of a checkpoint: format, code that loading runs, then values and tensors by name.

    Only the file itself is read, because git puts an old version alone in a temporary folder. A
    TensorFlow index is therefore described without its shards, by its stored tensor checksums. No line
    contains the file name or alignment, so that a change of one tensor changes one line. An unreadable
    file yields a sentence, because an error would end the whole `git diff`.
    """
    try:
        try:
            with _isolate_file(file) as copy:
                return tuple(_summary_lines(open_checkpoint(copy)))
        except CkpttoolError as error:
            return _describe_raw_file(file, _message_without_file(error))
    except OSError as error:
        return (f"not readable: {error.strerror or type(error).__name__}",)


@contextlib.contextmanager
def _isolate_file(file: str) -> Iterator[str]:
    """Yield a path with the same bytes and file name, in a folder without other files."""
    with tempfile.TemporaryDirectory(prefix="ckpttool-") as folder:
        copy = os.path.join(folder, os.path.basename(file))
        os.symlink(os.path.realpath(file), copy)
        yield copy


def _describe_raw_file(file: str, sentence: str) -> tuple[str, ...]:
    """Return a text file (e.g. a Git LFS pointer) unchanged; for other bytes, the sentence and a digest."""
    if not os.path.isfile(file):
        return (sentence,)
    nbytes = os.path.getsize(file)
    if nbytes <= _LONGEST_FILE:
        with open(file, "rb") as stream, contextlib.suppress(UnicodeDecodeError):
            text = stream.read().decode().expandtabs()
            if text and text.replace("\r", "").replace("\n", "").isprintable():
                return tuple(text.splitlines())
    if tf_common.v2_base(file) is not None:
        sentence = "data shard of a TensorFlow checkpoint; its .index file shows which tensor changed"
    with open(file, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return (sentence, f"{format_count(nbytes, 'byte')}, sha256 {digest[:_DIGITS]}")


def _message_without_file(error: CkpttoolError) -> str:
    """Return the error message without the file name, which differs each time."""
    error.file = None
    return str(error)


def _summary_lines(checkpoint: Checkpoint) -> Iterator[str]:
    tree = checkpoint.tree
    binding = None
    with contextlib.suppress(UsageError):  # if two layouts match, show neither
        binding = recognize_checkpoint(checkpoint)
    yield f"format {checkpoint.format}" + (f", {checkpoint.writer}" if checkpoint.writer else "")
    if binding is not None:
        yield f"layout {binding.layout}"
    for verdict in (code_references.CODE, code_references.UNKNOWN, code_references.CLASSES):
        for reference in sorted(
            code_references.filter_verdict(checkpoint.code_references, verdict), key=lambda name: name.name
        ):
            yield f"loading {'calls' if reference.calls else 'imports'} {reference.name} ({verdict})"
    names = [
        (tree.names[path].removesuffix(_SUFFIX), described) for path, described in _entry_lines(checkpoint)
    ]
    for path, aliases in tree.aliases.items():
        names += [(tree.alias_name(alias), f"alias of {tree.names[path]}") for alias in aliases]
    for name, described in sorted(names, key=lambda reference: natural_sort_key(reference[0])):
        yield f"{name} {described}"


def _entry_lines(checkpoint: Checkpoint) -> Iterator[tuple[Path, str]]:
    """Yield the description of each entry; one tensor is read while the previous one is hashed."""
    with WorkerThread() as lane:
        recorder = DigestRecorder(checkpoint, lane)
        read: dict[Path, str] = {}
        for path, leaf in recorder.checkpoint.tree.tensors():
            try:
                read[path] = _describe_numbers(leaf)
            except CkpttoolError as error:
                yield (
                    path,
                    f"{_format_leaf(leaf)} {_stored_checksums(checkpoint.tree[path]) or _message_without_file(error)}",  # noqa: E501
                )
        lane.wait()
        for path, numbers in read.items():
            digest = "" if numbers.startswith("=") else recorder.sha256(path)[:_DIGITS]
            yield path, " ".join(filter(None, (_format_leaf(checkpoint.tree[path]), digest, numbers)))
    for path, value in checkpoint.tree.plain():
        yield path, f"= {_describe_value(value)}"


def _format_leaf(leaf: Leaf | ValueLeaf) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if isinstance(leaf, Leaf) else ""


def _stored_checksums(leaf: Leaf | ValueLeaf) -> str:
    """Return the checksums in the index for a tensor whose bytes are in another file."""
    source = leaf.source if isinstance(leaf, Leaf) else None
    parts = [part for _, part in source.parts] if isinstance(source, SlicedTensor) else [source]
    checksums = [getattr(part, "checksum", None) for part in parts if not isinstance(part, Span)]
    return " ".join(
        f"{checksum.kind} {checksum.value:08x}" for checksum in checksums if isinstance(checksum, Checksum)
    )


def _describe_value(leaf: ValueLeaf) -> str:
    value = leaf.value
    if isinstance(value, Record):
        return _shorten_text(f"{value.name} {value.summary}".rstrip())
    if isinstance(value, bytes):
        return f"{format_count(len(value), 'byte')}, sha256 {hashlib.sha256(value).hexdigest()[:_DIGITS]}"
    return _shorten_text(repr(value))


def _shorten_text(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return f"{text[:_LONGEST]}... ({len(text):,} characters, sha256 {digest[:_DIGITS]})"


def _describe_numbers(leaf: Leaf) -> str:
    """Read a tensor and describe it: a few values as they are, many by their statistics, none as ""."""
    array = read_values(leaf)
    if array is None:
        return ""
    if isinstance(array, np.ndarray) and leaf.size <= _FEW:
        shown = ", ".join(map(str, array.reshape(-1)))
        return f"= [{shown}]" if leaf.shape else f"= {shown}"
    known = moments.compute_moments(array)
    problems = [f"{n:,} {word}" for n, word in ((known.nans, "NaN"), (known.infs, "infinite")) if n]
    if known.finite:
        problems.insert(0, f"{known.low:.4g} to {known.high:.4g}, mean {known.mean:.4g}, std {known.std:.4g}")
    return ", ".join(problems)
