"""The Checkpoint record: what one path on disk restores."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ckpttool.shown import clean
from ckpttool.source import File
from ckpttool.tree import Tree
from ckpttool.wire.asked import Asked

if TYPE_CHECKING:
    from ckpttool.face.branch import Branch
    from ckpttool.face.handle import Handle

Integrity = Literal["crc32c", "crc32", "none"]


@dataclass(frozen=True, slots=True, repr=False)
class Checkpoint:
    """What one path on disk restores.

    `path` is what was taken (a TensorFlow prefix rather than its `.index`), `files` everything that was
    read or that holds tensor bytes, `writer` what the file says about its writer, `integrity` the
    checksum that covers every tensor, `stored_nbytes` the size of the files, `notes` what a person
    should know. `details` is what only this format has to say (a SavedModel's signatures), as JSON values;
    docs/json.md describes it. `asks` is what loading by the format's own library would import, call or run;
    `unjudged` has a sentence for each part that may hold code and cannot be judged.

    A checkpoint is read like a mapping from names to tensors and plain values: see `root`.

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
    asks: tuple[Asked, ...] = ()
    unjudged: tuple[str, ...] = ()

    @property
    def stored_nbytes(self) -> int:
        """The number of bytes that the checkpoint takes on disk."""
        return sum(file.size for file in self.files)

    @property
    def root(self) -> Branch:
        """All of the checkpoint as a mapping from names to handles and values (see face.branch.Branch)."""
        from ckpttool.face.branch import Branch

        return Branch(self.tree, file=self.path)

    def __getitem__(self, name: str) -> Any:
        """Return what a name means: the Handle of a tensor, a plain value, or the Branch of a module.

        Names are display paths ("policy/actor/l1/kernel"), second paths, and the framework's own keys. Raise
        NameNotFoundError, which is a KeyError, for a name that nothing has.
        """
        return self.root[name]

    def __contains__(self, name: object) -> bool:
        """Say whether `[]` would find the name."""
        return name in self.root

    def __iter__(self) -> Iterator[str]:
        """Go through the names of all tensors and values."""
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
        """Return the tensor of that name; raise NameNotFoundError if there is none."""
        return self.root.tensor(name)

    def module(self, name: str) -> Branch:
        """Return the module of that name; raise NameNotFoundError if there is none."""
        return self.root.module(name)

    def glob(self, pattern: str) -> dict[str, Any]:
        """Return the entries whose names match a pattern: `*` within a segment, `**` across segments."""
        return self.root.glob(pattern)

    @property
    def title(self) -> str:
        """The checkpoint in a line: where it is, its format, counts and sums."""
        return f"Checkpoint {clean(self.path)} ({self.format}): {self.root.summary}"

    def __repr__(self) -> str:
        return f"<{self.title}>"

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Give rich the lines that a terminal shows: the modules with their sums, folded where long."""
        from ckpttool.face import outline

        for line in outline.lines(self.title, self.root.listed(), options.max_width):
            yield console.render_str(line, markup=False, emoji=False, highlight=False)

    def _repr_html_(self) -> str:
        """Return what a notebook shows: a tree to unfold; every name in it is text."""
        from ckpttool.face import markup

        return markup.branch(self.title, self.root.listed())

    def _ipython_key_completions_(self) -> list[str]:
        """Return what a notebook completes after `[`."""
        return self.root._ipython_key_completions_()
