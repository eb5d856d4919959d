"""File encodings, independent of checkpoints."""

from typing import TYPE_CHECKING

from ckpttool.core import package_face

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

__getattr__, __dir__ = package_face(__name__, _HOMES)
