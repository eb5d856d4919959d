"""d3rlpy's `.d3` files: one pickle with a torch archive, a JSON config and a version.

Source: d3rlpy/base.py in github.com/takuseno/d3rlpy (`dump_learnable`, `load_learnable`), since
version 2.0.
"""

from __future__ import annotations

import io
import json
from typing import IO, Any

from ckpttool.core import text
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.code_references import merge_references, relocate_references
from ckpttool.core.errors import FormatError, UnsupportedError, locate_errors
from ckpttool.core.source import File
from ckpttool.core.tree import Container, Leaf, Path, PathStep, Tree, ValueLeaf, key
from ckpttool.encodings.pickle_values import StoredBytes, dumps
from ckpttool.formats import settings, torch_legacy, torch_zip
from ckpttool.formats.file_listing import FileListing, join_trees
from ckpttool.formats.pickle_signatures import find_pickle_format
from ckpttool.formats.pickles import LoadedPickle, load_pickle_file
from ckpttool.formats.probe import OutputFile, Probe

NAME = "d3rlpy"
TITLE = "d3rlpy agent (.d3, since 2.0)"
WRITES = True
FRAMEWORK = "torch"

_ENTRIES = ("torch", "config", "version")
_SETTINGS = "the configuration"
_TORCH = (key("torch"),)
_PROTOCOL = 4


def claims(probe: Probe) -> str | None:
    """Return the path if it is a pickle of a dict whose first entry is `torch`, in bytes."""
    return probe.path if find_pickle_format(probe) == NAME else None


def read(location: str) -> Checkpoint:
    """List the tensors under `torch`, without copying them, and the settings under `config`.

    Nothing named in either pickle is imported or called. Raise FormatError if the file does not have
    the structure that d3rlpy writes, or a part of it is damaged.
    """
    file = File.stamp(location)
    with locate_errors(file=location):
        pickled = load_pickle_file(file)
        stored, config, version = _entries(pickled, location)
        tree, listing = _listed(file, stored, config, version)
    return Checkpoint(
        path=location,
        format=NAME,
        tree=tree,
        files=(file,),
        writer=f"d3rlpy {version}, {listing.writer}",
        integrity=listing.integrity,
        notes=listing.notes,
        details=listing.details,
        code_references=merge_references(
            pickled.code_references, relocate_references(listing.code_references, "torch")
        ),
        unjudged=tuple(f"torch: {content}" for content in listing.unjudged),
    )


def _entries(pickled: LoadedPickle, location: str) -> tuple[StoredBytes, str, str]:
    value = pickled.value
    names = list(value) if isinstance(value, dict) else []
    if sorted(map(str, names)) != sorted(_ENTRIES):
        raise FormatError(
            "the pickle does not have the structure that d3rlpy writes",
            file=location,
            expected=f"a dict of {', '.join(_ENTRIES)}",
            found=", ".join(map(str, names))[:200] or type(value).__name__,
        )
    stored, config, version = (value[name] for name in _ENTRIES)
    if not isinstance(stored, StoredBytes) or type(config) is not str or type(version) is not str:
        kinds = ", ".join(type(part).__name__ for part in (stored, config, version))
        raise FormatError(
            "an entry does not have the type that d3rlpy writes",
            file=location,
            expected="bytes and two strings",
            found=kinds,
        )
    return stored, config, version


def _listed(file: File, stored: StoredBytes, config: str, version: str) -> tuple[Tree, FileListing]:
    listing = torch_legacy.list_embedded(file, stored.at, stored.length)
    document = text.parse_json(config.encode(errors="surrogatepass"), _SETTINGS)
    parts: dict[PathStep, Tree] = {
        key("torch"): listing.tree,
        key("config"): settings.tree_from_json(document, _SETTINGS),
        key("version"): Tree({(): ValueLeaf(version)}),
    }
    return join_trees(parts, _key, Container("dict")), listing


def _key(part: PathStep, native: str) -> str:  # noqa: ARG001  # only the archive holds tensors
    """Return the torch key of the tensor in the archive."""
    return native


def pieces(tree: Tree) -> tuple[OutputFile]:
    """Return the single output file; raise UnsupportedError if the tree has no agent entries."""
    version = tree.get((key("version"),))
    config = _value(tree, (key("config"),))
    if not isinstance(version, ValueLeaf) or not isinstance(config, dict):
        raise UnsupportedError("the d3rlpy format can only store an agent with its configuration")
    (archive,) = torch_zip.pieces(tree.below(_TORCH))
    entries = {"config": json.dumps(config), "version": version.value}
    return (OutputFile("", lambda stream: _write(stream, archive, entries)),)


def stored(tree: Tree) -> Tree:
    """Return the tree with the paths used when it is read back; raise UnsupportedError as `pieces` does."""
    inner = torch_zip.stored(tree.below(_TORCH)).under(_TORCH)
    rest = {path: leaf for path, leaf in tree.items() if path[:1] != _TORCH}
    kept = {path: container for path, container in tree.containers.items() if path[:1] != _TORCH}
    return Tree({**inner, **rest}, inner.aliases, {**inner.containers, **kept})


def _write(stream: IO[bytes], archive: OutputFile, entries: dict[str, Any]) -> None:
    # The archive is a value of the pickle, preceded by its length.
    inner = io.BytesIO()
    archive.write(inner)
    stream.write(dumps({"torch": inner.getvalue(), **entries}, _PROTOCOL))


def _value(tree: Tree, at: Path) -> Any:
    """Return a subtree of settings as JSON: a dict, a list or a plain value; None for a tensor."""
    leaf = tree.get(at)
    if leaf is not None:
        return None if isinstance(leaf, Leaf) else leaf.value
    steps = dict.fromkeys(
        path[len(at)] for path in (*tree, *tree.containers) if path[: len(at)] == at != path
    )
    container = tree.containers.get(at)
    if container is not None and container.kind == "list":
        return [_value(tree, (*at, step)) for step in steps]
    return {step.value: _value(tree, (*at, step)) for step in steps}
