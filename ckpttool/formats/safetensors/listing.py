"""What a safetensors file holds: its tensors by name, tied names as aliases, the tree that we recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpttool import dtypes
from ckpttool.formats import recorded
from ckpttool.formats.listed import Listed
from ckpttool.formats.safetensors import header
from ckpttool.formats.safetensors.header import Entry
from ckpttool.formats.torch_pickle import roles
from ckpttool.leaf import Leaf, Path, Record, ValueLeaf, key
from ckpttool.source import File, Shape, Source, Span
from ckpttool.tree import Alias, Container, Tree

# What writers say of the framework that they served; no tensor's second name.
FORMAT = "format"
RECORD = "safetensors.Tensor"
RESERVED = frozenset((recorded.KEY, FORMAT, header.METADATA))


def listed(file: File) -> Listed:
    """Return the file's tree, notes and metadata; raise FormatError when the header breaks a rule."""
    found = header.read(file)
    metadata = {name: text for name, text in found.metadata.items() if name != recorded.KEY}
    entries = {name: _listed(file, name, entry) for name, entry in found.entries.items()}
    tree = bare(entries, metadata)
    notes = _notes(tree, found.entries)
    text = found.metadata.get(recorded.KEY)
    if text is not None:
        try:
            arrays = {name: leaf for name, leaf in entries.items() if isinstance(leaf, Leaf)}
            if len(arrays) != len(entries):
                raise recorded.DamagedError("the recorded tree is that of other tensors")
            tree = recorded.restored(text.encode(), arrays)
        except recorded.DamagedError as error:
            notes = (*notes, f"the tree that ckpttool recorded is not used: {error.message}")
    kept = {name: text for name, text in metadata.items() if not _is_tied(name, text, entries)}
    details: dict[str, Any] = {"metadata": kept} if kept else {}
    return Listed(tree, _writer(metadata), notes=notes, details=details)


def bare(entries: Mapping[str, Leaf | ValueLeaf], metadata: Mapping[str, str]) -> Tree:
    """Return the tree of a file that records none: each tensor under its name, tied names as aliases.

    safetensors/torch.py, save_model: of tensors that share storage one is kept, and the metadata say for each
    name that was left out which one has its tensor.
    """
    aliases: dict[Path, tuple[Alias, ...]] = {}
    for name, kept in metadata.items():
        if _is_tied(name, kept, entries):
            aliases[key(kept),] = (*aliases.get((key(kept),), ()), Alias((key(name),), name))
    return Tree({(key(name),): leaf for name, leaf in entries.items()}, aliases, {(): Container("dict")})


def _is_tied(name: str, kept: str, entries: Mapping[str, Leaf | ValueLeaf]) -> bool:
    return name not in RESERVED and name not in entries and isinstance(entries.get(kept), Leaf)


def _listed(file: File, name: str, entry: Entry) -> Leaf | ValueLeaf:
    row = dtypes.BY_SAFETENSORS.get(entry.code)
    if row is None:
        shape = ", ".join(map(str, entry.shape))
        return ValueLeaf(Record(RECORD, f"{entry.code[:40]}[{shape}]"))
    return tensor(name, row.name, entry.shape, Span(file, entry.offset, entry.nbytes))


def tensor(name: str, dtype: str, shape: Shape, source: Source) -> Leaf:
    """Return a tensor of which the file says no more than this."""
    return Leaf(dtype, shape, source, name, roles.by_name((key(name),)) or "parameter")


def _notes(tree: Tree, entries: Mapping[str, Entry]) -> tuple[str, ...]:
    notes = []
    tied = sum(map(len, tree.aliases.values()))
    if tied:
        notes.append(f"names that the metadata give to another's tensor: {tied:,}")
    other = sorted({e.code[:40] for e in entries.values() if e.code not in dtypes.BY_SAFETENSORS})
    if other:
        notes.append(f"tensors of types that are listed and not read: {', '.join(other)}")
    return tuple(notes)


def _writer(metadata: Mapping[str, str]) -> str | None:
    # transformers and safetensors.torch name the framework: "pt", "tf", "flax", "mlx", "np".
    said = metadata.get(FORMAT, "")
    return f"metadata format {said}" if said.isalnum() and len(said) < 16 else None
