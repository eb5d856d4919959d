"""A distributed checkpoint as a tree: tensors from their chunks, values from their items, nested as saved."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ckpttool import dtypes, places
from ckpttool.checkpoint import Integrity
from ckpttool.errors import CkpttoolError, FormatError, NotFoundError, TruncatedError, some
from ckpttool.formats.listed import Listed
from ckpttool.formats.pytorch_dcp import metadata, nesting
from ckpttool.formats.pytorch_dcp.metadata import Item, Metadata, Tensor
from ckpttool.formats.pytorch_dcp.sources import SavedTensor
from ckpttool.formats.slices import Box, Incomplete, Unreadable, assembled, box_of
from ckpttool.formats.torch_pickle import embedded, owners, roles
from ckpttool.leaf import Leaf, Path, Record, ValueLeaf
from ckpttool.source import File, Inline, MissingShard, Source
from ckpttool.tree import Alias, Container, Tree
from ckpttool.wire.asked import merged, standing


class Found(NamedTuple):
    """What a folder holds, and the files that say so."""

    listed: Listed
    files: tuple[File, ...]


def read(folder: str, names: Sequence[str]) -> Found:
    """List the folder's checkpoint by its metadata, the files of these names."""
    if not names:
        raise NotFoundError("shards are here, and the .metadata that says what they hold is not", file=folder)
    files = [File.stamp(os.path.join(folder, name)) for name in names]
    listing = _Listing(folder, metadata.merged([_metadata(file) for file in files]))
    found = owners.joined(listing.tree())
    version = listing.told.version
    writer = "torch distributed checkpoint" + (f" version {version}" if version else "")
    notes = (*listing.notes(), *found.notes)
    shards = (shard for shard in listing.shards.values() if shard is not None)
    return Found(
        Listed(found.tree, writer, listing.integrity(), notes, asks=listing.asks),
        (*files, *shards),
    )


def _metadata(file: File) -> Metadata:
    try:
        return metadata.read(file)
    except CkpttoolError as error:
        raise error.located(file=file.path) from error.__cause__


class _Listing:
    """Collects the tree; each shard is looked at once, whether it is there and how long it is."""

    def __init__(self, folder: str, told: Metadata) -> None:
        self.folder = folder
        self.told = told
        self.shards: dict[str, File | None] = {}
        self.leaves: dict[Path, Leaf | ValueLeaf] = {}
        self.aliases: dict[Path, tuple[Alias, ...]] = {}
        self.containers: dict[Path, Container] = {}
        self.asks = standing(told.asked, ".metadata")
        self._said: dict[str, None] = {}
        self._recorded: dict[str, Integrity] = {}

    def tree(self) -> Tree:
        """Return the tree of all entries, in the order of the metadata."""
        places = nesting.paths(self.told.entries, self.told.paths)
        self.containers, gaps = nesting.containers(places.values())
        optimizers = roles.optimizers(places.values())
        for name, entry in self.told.entries.items():
            try:
                if entry is None:
                    self._value(name, places[name])
                else:
                    use = roles.use(places[name], optimizers)
                    self._tensor(name, places[name], entry, use)
            except CkpttoolError as error:
                raise error.located(path=name) from error.__cause__
        self.leaves |= {path: ValueLeaf(None) for path in gaps}
        return Tree(self.leaves, self.aliases, self.containers)

    def notes(self) -> tuple[str, ...]:
        """Return what a person should know: shards that are missing, and what was said of single values."""
        lost = [name for name, file in self.shards.items() if file is None]
        missing = f"shards that are not there, whose tensors cannot be read: {some(sorted(lost), 5)}"
        return (*((missing,) if lost else ()), *self._said)

    def integrity(self) -> Integrity:
        """Return which checksum covers the tensors, as one item of each shard shows it."""
        there = [name for name, shard in self.shards.items() if shard is not None]
        covered = there and all(self._recorded.get(name) == "crc32" for name in there)
        return "crc32" if covered else "none"

    def _tensor(self, name: str, path: Path, entry: Tensor, use: roles.Use) -> None:
        row = dtypes.BY_TORCH.get(entry.dtype)
        if row is None or row.name not in dtypes.BY_NAME:
            shown = f"{entry.dtype}[{', '.join(map(str, entry.shape))}]"
            self.leaves[path] = ValueLeaf(Record("torch.Tensor", shown))
            return
        source = self._source(name, entry, row)
        self.leaves[path] = Leaf(row.name, entry.shape, source, name, use.role, slot=use.slot)

    def _source(self, name: str, entry: Tensor, row: dtypes.DType) -> Source:
        parts: list[tuple[Box, Source]] = []
        files: dict[str, int] = {}
        for chunk in entry.chunks:
            if len(chunk.offsets) != len(chunk.sizes):
                raise FormatError("a chunk's offset and size have different ranks")
            box = box_of(tuple(zip(chunk.offsets, chunk.sizes, strict=True)), entry.shape)
            item = self._item(name, chunk.offsets, single=len(entry.chunks) == 1)
            shard = self._shard(item)
            files[item.file] = shard.size if shard else 0
            parts.append((box, self._part(item, shard, row, chunk.sizes)))
        if 0 in entry.shape:
            return Inline(b"")
        whole = os.path.join(self.folder, ".metadata")
        source = assembled(row.name, entry.shape, parts, whole)
        lost = next((part for _, part in parts if isinstance(part, MissingShard | Unreadable)), None)
        nbytes = math.prod(entry.shape) * row.itemsize
        if lost is None and nbytes > sum(files.values()):
            raise FormatError("a tensor is larger than the shards that hold it", expected=f"{nbytes:,} bytes")
        if lost is not None:
            return lost
        return parts[0][1] if len(parts) == 1 and not isinstance(source, Incomplete) else source

    def _part(self, item: Item, shard: File | None, row: dtypes.DType, shape: tuple[int, ...]) -> Source:
        if shard is None:
            return MissingShard(os.path.join(self.folder, item.file))
        if item.transforms:
            return Unreadable(shard.path, f"items that went through {some(item.transforms, 3)} are not read")
        # Each item holds its own tensor, uncompressed (filesystem.py, _SerialCpuLoader).
        if math.prod(shape) * row.itemsize > item.length:
            raise FormatError(
                "an item is shorter than its tensor",
                file=shard.path,
                offset=item.offset,
                expected=f"{math.prod(shape) * row.itemsize:,} bytes",
                found=f"{item.length:,}",
            )
        return SavedTensor(shard, item.offset, item.length, row.name, shape)

    def _value(self, name: str, path: Path) -> None:
        item = self._item(name, None, single=True)
        shard = self._shard(item)
        if shard is None or item.transforms:
            why = f"in {item.file}, which is missing" if shard is None else "went through a transform"
            self.leaves[path] = ValueLeaf(Record("value", why))
            return
        held = embedded.listed(shard, item.offset, item.length)
        self._said |= dict.fromkeys(held.notes)
        self.asks = merged(self.asks, standing(held.asks, item.file))
        for at, leaf in held.tree.items():
            full = _name(name, at)
            of = (*path, *leaf.of) if isinstance(leaf, Leaf) and leaf.of is not None else None
            self.leaves[*path, *at] = replace(leaf, key=full, of=of) if isinstance(leaf, Leaf) else leaf
        for at, others in held.tree.aliases.items():
            self.aliases[*path, *at] = tuple(Alias((*path, *a.path), _name(name, a.path)) for a in others)
        self.containers |= {(*path, *at): kind for at, kind in held.tree.containers.items()}

    def _item(self, name: str, offset: tuple[int, ...] | None, *, single: bool) -> Item:
        item = self.told.items.get((name, metadata.place(offset)))
        if item is None and single:
            item = self.told.items.get((name, metadata.place(None)))
        if item is None:
            raise FormatError("the metadata do not say where an entry lies")
        return item

    def _shard(self, item: Item) -> File | None:
        if item.file not in self.shards:
            self.shards[item.file] = self._look(item.file)
        shard = self.shards[item.file]
        if shard is not None and item.offset + item.length > shard.size:
            raise TruncatedError(
                "an item lies beyond its shard's end",
                file=shard.path,
                offset=item.offset,
                expected=f"{item.length:,} bytes",
                found=f"{max(0, shard.size - item.offset):,}",
            )
        if shard is not None and item.file not in self._recorded and not item.transforms:
            self._recorded[item.file] = embedded.listed(shard, item.offset, item.length).integrity
        return shard

    def _look(self, name: str) -> File | None:
        path = os.path.join(self.folder, name)
        kind = places.kind(path)
        if kind == "missing":
            return None
        if kind != "file":
            raise FormatError("a shard is not a file", file=path)
        return File.beside(path, os.path.join(self.folder, ".metadata"))


def _name(name: str, below: Path) -> str:
    return ".".join((name, *(str(step.value) for step in below)))
