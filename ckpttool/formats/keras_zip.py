"""Keras 3's `.keras` archives: a zip of metadata.json, config.json and model.weights.h5.

Source: keras/src/saving/saving_lib.py, _save_model_to_fileobj. The HDF5 file is a member that is stored as it
is, so leaves are spans of the archive; its CRC-32 is checked, once, when the first leaf is read.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ckpttool.formats.probe import Probe
from ckpttool.wire import zip  # noqa: A004 - the module is named by its format

if TYPE_CHECKING:
    from ckpttool.checkpoint import Checkpoint
    from ckpttool.formats.hdf5 import Index
    from ckpttool.wire.zip import Archive

NAME = "keras_zip"
TITLE = "Keras 3 model (.keras)"
WRITES = False
FRAMEWORK = "tensorflow"

CONFIG, METADATA = "config.json", "metadata.json"
WEIGHTS, SHARDS, PICKLED = "model.weights.h5", "model.weights.json", "model.weights.npz"
# The first member's name in a local header (30 bytes), for archives whose end is damaged or missing.
_FIRST = re.compile(rb"(metadata|config)\.json", re.ASCII)


def claims(probe: Probe) -> str | None:
    """Return the path of a zip with a configuration and weights, or of a damaged one that begins like it."""
    if probe.damage is not None:
        return probe.path if _FIRST.match(probe.head, zip.LOCAL.size) else None
    weights = any(name in probe.members for name in (WEIGHTS, SHARDS, PICKLED))
    return probe.path if weights and CONFIG in probe.members else None


def read(location: str) -> Checkpoint:
    """List the model; the configuration is read as data and nothing in it is looked up or run.

    Raise FormatError when archive or weights are damaged, UnsupportedError for weights that are pickled.
    """
    from ckpttool.checkpoint import Checkpoint
    from ckpttool.formats import keras_tree
    from ckpttool.formats.keras_tree.asking import Judged, judged, together
    from ckpttool.formats.keras_tree.config import config_of
    from ckpttool.formats.keras_tree.optimizers import told
    from ckpttool.source import File

    file = File.stamp(location)
    archive = zip.read(file)
    config, notes = _document(archive, CONFIG)
    metadata, more = _document(archive, METADATA)
    judges = [judged(bytes(archive.source(n).read()), n) for n in (CONFIG, METADATA) if n in archive.members]
    index = _index(archive)
    model, compiled = config_of(config), config.get("compile_config")
    optimizer = told(compiled.get("optimizer") if isinstance(compiled, dict) else None)
    found = keras_tree.named(file.path, lambda: keras_tree.model(index, model, optimizer))
    version = metadata.get("keras_version")
    details = {key: value for key, value in metadata.items() if isinstance(value, str)}
    judgement = together([*judges, Judged(found.asks, found.unjudged)])
    assets = sum(name.startswith("assets/") for name in archive.members)
    notes += (*more, *((f"assets that are not read: {assets:,}",) if assets else ()), *found.notes)
    return Checkpoint(
        path=location,
        format=NAME,
        tree=found.tree,
        files=(file,),
        writer=f"Keras {version}" if isinstance(version, str) else None,
        integrity="crc32" if archive.recorded else "none",
        notes=notes,
        details={**found.details, **details},
        asks=judgement.asks,
        unjudged=judgement.unjudged,
    )


def _document(archive: Archive, name: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    from ckpttool import limits
    from ckpttool.errors import CkpttoolError
    from ckpttool.formats.keras_tree.config import parse

    member = archive.members.get(name)
    if member is None:
        return {}, (f"the archive has no {name}",)
    if member.size > limits.current().json_bytes:
        raise limits.exceeded("json_bytes", f"{name} is too large", member.size, file=archive.file.path)
    try:
        return parse(bytes(archive.source(name).read()), name)
    except CkpttoolError as error:
        raise error.located(file=archive.file.path) from error.__cause__


def _index(archive: Archive) -> Index:
    from ckpttool.errors import FormatError, UnsupportedError
    from ckpttool.formats import hdf5
    from ckpttool.formats.keras_tree import shards

    path = archive.file.path
    if WEIGHTS in archive.members:
        names = [WEIGHTS]
    elif SHARDS in archive.members:
        names = shards.shard_names(_document(archive, SHARDS)[0], path)
    elif PICKLED in archive.members:
        raise UnsupportedError(f"{PICKLED} holds pickled objects, which are not read", file=path)
    else:
        raise FormatError(f"the archive has no {WEIGHTS}", file=path)
    return shards.merged([hdf5.index(archive.source(name)) for name in names], path)
