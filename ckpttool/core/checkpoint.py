"""Checkpoint: what one path restores."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from ckpttool.core.deferred import dataclass, field
from ckpttool.core.source import File, KeptSource, Storage
from ckpttool.core.text import clean
from ckpttool.core.tree import Role, Tree

if TYPE_CHECKING:
    from ckpttool.core.code_references import CodeReference
    from ckpttool.core.handles import Branch, Handle


Integrity = Literal["crc32c", "crc32", "none"]


@dataclass(frozen=True, slots=True, repr=False)
class Checkpoint:
    """Contents of one checkpoint.

    `path` is the resolved path (a TensorFlow prefix rather than its `.index`), `files` everything
    that was read or that contains tensor bytes, `writer` the writer that the file names, `integrity`
    the checksum that covers every tensor, `stored_nbytes` the size of the files, `notes` information
    for people. `details` are format-specific facts (a SavedModel's signatures), as JSON values;
    docs/json.md describes it. `code_references` is what loading by the format's own library would
    import, call or run; `unjudged` has a sentence for each part that may contain code and cannot be judged.
    `plain` are pickles of which the format has found that any reader makes only data of them.

    A checkpoint is a mapping from names to tensors and plain values: see `root`.

    >>> import ckpttool
    >>> checkpoint = ckpttool.open("sample_ckpts/td3_pendulum_torch/ckpt-15000.pt")
    >>> checkpoint["actor/l1/weight"]
    <Handle actor/l1/weight float32[64, 3] parameter>
    >>> checkpoint["actor"]
    <Branch actor: 6 tensors, 4,481 parameters, 17.9 kB>
    >>> checkpoint["total_it"], "critic/l9" in checkpoint
    (14000, False)
    """

    path: str
    format: str
    tree: Tree
    files: tuple[File, ...]
    writer: str | None = None
    integrity: Integrity = "none"
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    code_references: tuple[CodeReference, ...] = ()
    unjudged: tuple[str, ...] = ()
    plain: frozenset[Storage] = frozenset()

    @property
    def stored_nbytes(self) -> int:
        """Size of the checkpoint on disk in bytes."""
        return sum(file.size for file in self.files)

    @property
    def root(self) -> Branch:
        """The whole checkpoint as a mapping from names to handles and values (see Branch)."""
        from ckpttool.core.handles import Branch

        return Branch(self.tree, file=self.path)

    def __getitem__(self, name: str) -> Any:
        """Return the entry of a name: the Handle of a tensor, a plain value, or the Branch of a module.

        Names are display paths ("policy/actor/l1/kernel"), aliases, and the framework's own keys. Raise
        NameNotFoundError, which is a KeyError, if no entry has the name.
        """
        return self.root[name]

    def __contains__(self, name: object) -> bool:
        """Return whether `[]` would find the name."""
        return name in self.root

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of all tensors and values."""
        return iter(self.root)

    def __len__(self) -> int:
        """Return the number of tensors and values."""
        return len(self.tree)

    def keys(self) -> KeysView[str]:
        """Return the names of all tensors and values."""
        return self.root.keys()

    def values(self) -> ValuesView[Any]:
        """Return handles and plain values."""
        return self.root.values()

    def items(self) -> ItemsView[str, Any]:
        """Return names, each with its handle or plain value."""
        return self.root.items()

    def tensor(self, name: str) -> Handle:
        """Return the tensor with that name; raise NameNotFoundError if there is none."""
        return self.root.tensor(name)

    def module(self, name: str) -> Branch:
        """Return the module with that name; raise NameNotFoundError if there is none."""
        return self.root.module(name)

    def glob(self, pattern: str) -> dict[str, Any]:
        """Return the entries whose names match a pattern: `*` within a segment, `**` across segments."""
        return self.root.glob(pattern)

    @property
    def title(self) -> str:
        """Return a one-line summary: location, format, counts and sizes."""
        return f"Checkpoint {clean(self.path)} ({self.format}): {self.root.summary}"

    def __repr__(self) -> str:
        return f"<{self.title}>"

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Render the modules with their totals as a folded tree for a terminal (rich)."""
        from ckpttool.core.tree_views import render_lines

        for line in render_lines(self.title, self.root.listed(), options.max_width):
            yield console.render_str(line, markup=False, emoji=False, highlight=False)

    def _repr_html_(self) -> str:
        """Return the HTML for a notebook: a tree to unfold, with every name escaped as text."""
        from ckpttool.core.tree_views import render_branch

        return render_branch(self.title, self.root.listed())

    def _ipython_key_completions_(self) -> list[str]:
        """Return the names that a notebook completes after `[`."""
        return self.root._ipython_key_completions_()


# Memory limit for the networks' tensors of one checkpoint while several readers use them in turn.
_KEPT_NBYTES = 8 << 20
_KEPT_ROLES: tuple[Role, ...] = ("parameter", "buffer", "counter")
_SCALARS_NBYTES = 64  # optimizer hyperparameters that several slots need


def keep_network_reads(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with a cache of the networks' tensors.

    A conversion reads them for the digest, to write them and to compare outputs. The smallest
    tensors are kept, up to 8 MiB in all; optimizer slots and replay buffers are read again.
    """
    kept, room = {}, _KEPT_NBYTES
    for path, leaf in sorted(checkpoint.tree.tensors(), key=lambda leaf: leaf[1].nbytes):
        if leaf.nbytes <= (room if leaf.role in _KEPT_ROLES else _SCALARS_NBYTES):
            room -= leaf.nbytes
            kept[path] = replace(leaf, source=KeptSource(leaf.source))
    tree = checkpoint.tree
    leaves = {path: kept.get(path, leaf) for path, leaf in tree.items()}
    return replace(checkpoint, tree=Tree(leaves, tree.aliases, tree.containers))
