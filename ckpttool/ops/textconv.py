"""`textconv`: a checkpoint's file as lines that git can lay side by side, of the file's own bytes alone."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator

from ckpttool.behind import Lane
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError, UnsupportedError, UsageError
from ckpttool.formats import object_graph, saver_paths
from ckpttool.formats.resolve import open_checkpoint
from ckpttool.formats.slices import Assembled
from ckpttool.layouts.recognise import recognised
from ckpttool.leaf import Leaf, Path, Record, ValueLeaf
from ckpttool.ops import moments
from ckpttool.ops.digest import Overheard
from ckpttool.ops.rows import natural
from ckpttool.shown import count
from ckpttool.source import Checksum, Span, as_array
from ckpttool.wire import asked

# A digest's first digits: of a million tensors two share them once in five hundred times.
_DIGITS = 12
# A text that is longer is told by its length and digest.
_LONGEST = 200
# So many numbers of a tensor say more themselves than what they are like.
_FEW = 4
_SUFFIX = object_graph.MARK + object_graph.VALUE
# Bytes of a text that is shown as it is.
_LONGEST_FILE = 1 << 20


def textconv(file: str) -> tuple[str, ...]:
    """Return the lines: what the file is, what loading it would run, then its values and tensors by name.

    Nothing beside the file is looked at, because git has a past version alone in a folder of its own. So a
    TensorFlow index is told without its shards, by the checksums that it has of their tensors. No line
    names the file, and none is aligned with another: a change of one tensor changes one line. A file that
    cannot be read is told in a sentence: an error would end all of `git diff`.
    """
    try:
        try:
            with _alone(file) as place:
                return tuple(_lines(open_checkpoint(place)))
        except CkpttoolError as error:
            return _unread(file, _bare(error))
    except OSError as error:
        return (f"not readable: {error.strerror or type(error).__name__}",)


@contextlib.contextmanager
def _alone(file: str) -> Iterator[str]:
    """Give a place with the same bytes and name, and no other file beside it."""
    with tempfile.TemporaryDirectory(prefix="ckpttool-") as folder:
        place = os.path.join(folder, os.path.basename(file))
        os.symlink(os.path.realpath(file), place)
        yield place


def _unread(file: str, sentence: str) -> tuple[str, ...]:
    """Return a text, which a Git LFS pointer is too, as it is; of other bytes the sentence and a digest."""
    if not os.path.isfile(file):
        return (sentence,)
    nbytes = os.path.getsize(file)
    if nbytes <= _LONGEST_FILE:
        with open(file, "rb") as stream, contextlib.suppress(UnicodeDecodeError):
            text = stream.read().decode().expandtabs()
            if text and text.replace("\r", "").replace("\n", "").isprintable():
                return tuple(text.splitlines())
    if saver_paths.v2_base(file) is not None:
        sentence = "data of a TensorFlow checkpoint, whose .index says which tensor has changed"
    with open(file, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return (sentence, f"{count(nbytes, 'byte')}, sha256 {digest[:_DIGITS]}")


def _bare(error: CkpttoolError) -> str:
    """Return the error's sentence without the file, whose name is another one each time."""
    error.file = None
    return str(error)


def _lines(checkpoint: Checkpoint) -> Iterator[str]:
    tree = checkpoint.tree
    binding = None
    with contextlib.suppress(UsageError):  # of two layouts that fit, none is told
        binding = recognised(checkpoint)
    yield f"format {checkpoint.format}" + (f", {checkpoint.writer}" if checkpoint.writer else "")
    if binding is not None:
        yield f"layout {binding.layout}"
    for verdict in (asked.CODE, asked.CLASSES):
        for each in sorted(asked.of(checkpoint.asks, verdict), key=lambda each: each.name):
            yield f"loading {'calls' if each.calls else 'imports'} {each.name} ({verdict})"
    names = [(tree.names[path].removesuffix(_SUFFIX), told) for path, told in _told(checkpoint)]
    for path, aliases in tree.aliases.items():
        names += [(tree.alias_name(alias), f"is {tree.names[path]}") for alias in aliases]
    for name, told in sorted(names, key=lambda each: natural(each[0])):
        yield f"{name} {told}"


def _told(checkpoint: Checkpoint) -> Iterator[tuple[Path, str]]:
    """Give what there is to say of each entry; one tensor is read while the one before it is hashed."""
    with Lane() as lane:
        overheard = Overheard(checkpoint, lane)
        read: dict[Path, str] = {}
        for path, leaf in overheard.checkpoint.tree.tensors():
            try:
                read[path] = _numbers(leaf)
            except CkpttoolError as error:
                yield path, f"{_form(leaf)} {_stored(checkpoint.tree[path]) or _bare(error)}"
        lane.wait()
        for path, numbers in read.items():
            digest = "" if numbers.startswith("=") else overheard.sha256(path)[:_DIGITS]
            yield path, " ".join(filter(None, (_form(checkpoint.tree[path]), digest, numbers)))
    for path, value in checkpoint.tree.plain():
        yield path, f"= {_value(value)}"


def _form(leaf: Leaf | ValueLeaf) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if isinstance(leaf, Leaf) else ""


def _stored(leaf: Leaf | ValueLeaf) -> str:
    """Return the checksums that the index has of a tensor whose bytes are in another file."""
    source = leaf.source if isinstance(leaf, Leaf) else None
    parts = [part for _, part in source.parts] if isinstance(source, Assembled) else [source]
    found = [getattr(part, "checksum", None) for part in parts if not isinstance(part, Span)]
    return " ".join(f"{each.kind} {each.value:08x}" for each in found if isinstance(each, Checksum))


def _value(leaf: ValueLeaf) -> str:
    value = leaf.value
    if isinstance(value, Record):
        return _short(f"{value.name} {value.summary}".rstrip())
    if isinstance(value, bytes):
        return f"{count(len(value), 'byte')}, sha256 {hashlib.sha256(value).hexdigest()[:_DIGITS]}"
    return _short(repr(value))


def _short(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return f"{text[:_LONGEST]}... ({len(text):,} characters, sha256 {digest[:_DIGITS]})"


def _numbers(leaf: Leaf) -> str:
    """Read a tensor; return a few numbers themselves, of many what they are like, of none nothing."""
    data = leaf.read()
    try:
        array = as_array(data, leaf.dtype, leaf.shape)
    except UnsupportedError:
        return ""
    if leaf.size <= _FEW:
        shown = ", ".join(map(str, array.reshape(-1)))
        return f"= [{shown}]" if leaf.shape else f"= {shown}"
    known = moments.of(array)
    found = [f"{n:,} {word}" for n, word in ((known.nans, "NaN"), (known.infs, "infinite")) if n]
    if known.finite:
        found.insert(0, f"{known.low:.4g} to {known.high:.4g}, mean {known.mean:.4g}, std {known.std:.4g}")
    return ", ".join(found)
