"""The shared corpus's truth: what the owning framework read of a file, tensor by tensor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from ckpttool.core import Leaf
from ckpttool.formats import Format, Probe
from tests.conftest import CORPUS


def files(format: Format) -> Iterator[Path]:  # noqa: A002 - the glossary's word
    """Go through the corpus's PyTorch files that the format claims and that have a truth."""
    for file in sorted((CORPUS / "torch").rglob("*.truth.json")):
        path = Path(str(file).removesuffix(".truth.json"))
        if path.is_file() and format.claims(Probe(str(path))):
            yield path


def require(format: Format, path: Path) -> None:  # noqa: A002
    """Assert that every tensor of the truth is there, with its type, shape and bytes."""
    tree = format.read(str(path)).tree
    named = {leaf.key: leaf for _, leaf in tree.tensors()}
    named |= {alias.key: tree[p] for p, aliases in tree.aliases.items() for alias in aliases}
    for name, expected in json.loads(Path(f"{path}.truth.json").read_text()).items():
        leaf = named[name]
        assert isinstance(leaf, Leaf)
        digest = hashlib.sha256(leaf.read()).hexdigest()
        assert (leaf.dtype, list(leaf.shape), digest) == tuple(expected.values()), (path, name)
