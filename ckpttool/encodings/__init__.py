"""File encodings without any notion of a checkpoint."""

import importlib
from typing import TYPE_CHECKING, Any

# Names that other programs import from the package: they are imported from their files when first used.

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
    """Import the name's file when the name is used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> "list[str]":
    """List the names."""
    return __all__
