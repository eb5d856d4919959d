"""A sharded `.weights.h5`: a JSON map beside several HDF5 files that together hold the groups.

Source: keras/src/saving/saving_lib.py, ShardedH5IOStore: `{"metadata": {"total_size": bytes}, "weight_map":
{"/layers/dense/vars": ["model_00000.weights.h5", ...]}}`; a group may be in several files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from ckpttool import documents
from ckpttool.errors import FormatError
from ckpttool.formats import hdf5
from ckpttool.formats.hdf5 import Dataset, Group, Index
from ckpttool.source import File


def read(file: File) -> tuple[tuple[File, ...], Index]:
    """Return the map and its shards, which lie in the same folder, and what they hold together."""
    found = documents.load(file.path, "the map of a sharded .weights.h5")
    names = shard_names(found, file.path)
    folder = os.path.dirname(file.path)
    shards = [File.beside(os.path.join(folder, name), file.path) for name in names]
    return (file, *shards), merged([hdf5.index(hdf5.whole(shard)) for shard in shards], file.path)


def shard_names(document: dict[str, Any], path: str) -> list[str]:
    """Return the names of the shards in their order; raise FormatError for one in another folder."""
    weights = document.get("weight_map")
    if not isinstance(weights, dict):
        raise FormatError("the file is not the map of a sharded .weights.h5", file=path)
    names: dict[str, None] = {}
    for value in weights.values():
        for name in value if isinstance(value, list) else [value]:
            if not isinstance(name, str) or os.path.basename(name) != name or "\0" in name or not name:
                raise FormatError("a shard's name is not that of a file beside the map", file=path)
            names[name] = None
    if not names:
        raise FormatError("the map names no shard", file=path)
    return sorted(names)


def merged(indexes: Iterable[Index], path: str) -> Index:
    """Return the groups and datasets of all shards; raise FormatError for a dataset that two have."""
    groups: dict[str, Group] = {}
    datasets: dict[str, Dataset] = {}
    same: dict[str, str] = {}
    notes: list[str] = []
    base = 0
    for one in indexes:
        for name, group in one.groups.items():
            # What lies in a later shard came later.
            groups.setdefault(name, group._replace(address=base + group.address))
        for name, dataset in one.datasets.items():
            if name in datasets:
                raise FormatError(f"dataset {name[:200]} is in two shards", file=path)
            datasets[name] = dataset
        same |= one.same
        notes += one.notes
        base += 1 << 62
    return Index(groups, datasets, same, tuple(notes))
