"""Checkpoints with something wrong in them: a torch file, written again after a change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from ckpttool.conversion.write import save
from ckpttool.core import CkpttoolError, Leaf, Tree, ValueLeaf
from ckpttool.core import Path as TreePath
from ckpttool.core.digests import digest_checkpoint
from ckpttool.formats import open_checkpoint

Leaves = dict[TreePath, Leaf | ValueLeaf]
Change = Callable[[Leaves, dict[str, TreePath]], None]


def changed(source: Path, target: Path, change: Change) -> str:
    """Write the file's tree after `change(leaves, path by name)`; return where."""
    tree = open_checkpoint(str(source)).tree
    leaves = dict(tree.leaves)
    change(leaves, {name: path for path, name in tree.names.items()})
    save(Tree(leaves, tree.aliases, tree.containers), str(target))
    return str(target)


def require_refused_or_listed(path: str, times: int, size: int | None = None) -> None:
    """Flip bits among the first `size` bytes of a file without checksums, one at a time.

    The format must state that it has no checksums; what is damaged is refused or is listed.
    """
    assert open_checkpoint(path).integrity == "none"
    whole = Path(path).read_bytes()
    generator = np.random.default_rng(0)
    for _ in range(times):
        content = bytearray(whole)
        content[generator.integers(size or len(whole))] ^= 1 << generator.integers(8)
        Path(path).write_bytes(content)
        try:
            digest_checkpoint(open_checkpoint(path))
        except CkpttoolError as error:
            assert str(error).isprintable()  # noqa: PT017  # both outcomes are right
