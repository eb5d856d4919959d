"""File encodings, independent of checkpoints."""

import importlib
from typing import TYPE_CHECKING, Any

# Public names, imported from their modules on first use.

if TYPE_CHECKING:
    from ckpttool.encodings.archives import ZipWriter
    from ckpttool.encodings.pickle_reader import parse_pickle
    from ckpttool.encodings.pickle_values import (
        Dict,
        Global,
        OpaqueKey,
        PersistentId,
        PickleObject,
        Set,
        StoredBytes,
        dumps,
        pickle_array,
    )
    from ckpttool.encodings.protobuf import ScalarEvent
    from ckpttool.encodings.sstable import write_table

__all__ = [
    "Dict",
    "Global",
    "OpaqueKey",
    "PersistentId",
    "PickleObject",
    "ScalarEvent",
    "Set",
    "StoredBytes",
    "ZipWriter",
    "dumps",
    "parse_pickle",
    "pickle_array",
    "write_table",
]

_HOMES = {
    "Dict": "pickle_values",
    "Global": "pickle_values",
    "OpaqueKey": "pickle_values",
    "PersistentId": "pickle_values",
    "PickleObject": "pickle_values",
    "ScalarEvent": "protobuf",
    "Set": "pickle_values",
    "StoredBytes": "pickle_values",
    "ZipWriter": "archives",
    "dumps": "pickle_values",
    "parse_pickle": "pickle_reader",
    "pickle_array": "pickle_values",
    "write_table": "sstable",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> "list[str]":
    """Return the public names."""
    return __all__
