"""File encodings, independent of checkpoints."""

from typing import TYPE_CHECKING

from ckpttool import package_face

if TYPE_CHECKING:
    from ckpttool.encodings.archives import ZipWriter as ZipWriter
    from ckpttool.encodings.pickle_reader import parse_pickle as parse_pickle
    from ckpttool.encodings.pickle_values import (
        Dict as Dict,
        Global as Global,
        OpaqueKey as OpaqueKey,
        PersistentId as PersistentId,
        PickleObject as PickleObject,
        Set as Set,
        StoredBytes as StoredBytes,
        dumps as dumps,
        pickle_array as pickle_array,
    )
    from ckpttool.encodings.protobuf import ScalarEvent as ScalarEvent
    from ckpttool.encodings.sstable import write_table as write_table

package_face()
