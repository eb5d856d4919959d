"""Which operations of a graph touch the machine that runs it; no graph is run here.

Sources: tensorflow/core/ops/io_ops.cc, script_ops.cc, dataset_ops.cc, experimental_dataset_ops.cc,
summary_ops.cc, logging_ops.cc, debug_ops.cc, decode_proto_ops.cc. Saving and restoring variables, which every
SavedModel can do, and tables of its own assets are not among them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckpttool.wire.asked import CODE, Asked

_OPERATIONS = (
    "PyFunc PyFuncStateless EagerPyFunc ReadFile WriteFile MatchingFiles WholeFileReader WholeFileReaderV2 "
    "TextLineReader TextLineReaderV2 FixedLengthRecordReader FixedLengthRecordReaderV2 TFRecordReader "
    "TFRecordReaderV2 LMDBReader TextLineDataset FixedLengthRecordDataset FixedLengthRecordDatasetV2 "
    "TFRecordDataset TFRecordDatasetV2 SqlDataset LMDBDataset CSVDataset CSVDatasetV2 CacheDataset "
    "CacheDatasetV2 SaveDataset SaveDatasetV2 LoadDataset SnapshotDataset SnapshotDatasetV2 DistributedSave "
    "MatchingFilesDataset DataServiceDataset DataServiceDatasetV2 DataServiceDatasetV3 DataServiceDatasetV4 "
    "RegisterDataset RegisterDatasetV2 CreateSummaryFileWriter CreateSummaryDbWriter ImportEvent PrintV2 "
    "DebugIdentity DebugIdentityV2 DebugIdentityV3 DebugNanCount DebugNumericSummary DebugNumericSummaryV2 "
    "DecodeProtoV2 EncodeProto DatasetToTFRecord ExperimentalDatasetToTFRecord ExperimentalCSVDataset "
    "ExperimentalLMDBDataset ExperimentalMatchingFilesDataset ExperimentalSqlDataset SnapshotDatasetReader "
    "SnapshotNestedDatasetReader SnapshotChunkDataset ListSnapshotChunksDataset LoadAndRemapMatrix "
    "GenerateVocabRemapping RemoteFusedGraphExecute RpcCall RpcClient RpcServer RpcServerStart"
)


def _op(name: str) -> bytes:
    # A number may be written with more bytes than it needs, and readers take it.
    length = len(name)
    return rb"(?:%b|%b\x80{0,8}\0)(%b)" % (
        re.escape(bytes((length,))),
        re.escape(bytes((length | 0x80,))),
        name.encode(),
    )


# NodeDef.op (node_def.proto), in the graph or in a function of its library: field 2, its length, the name.
_OP = re.compile(rb"(?:\x12|\x92\x80{0,8}\0)(?:%b)" % b"|".join(map(_op, _OPERATIONS.split())))


def asks(graphs: Iterable[memoryview], where: str) -> tuple[Asked, ...]:
    """Return the operations that touch files, call Python or connect, and how often each stands there."""
    found: dict[str, int] = {}
    for graph in graphs:
        for match in _OP.finditer(graph):
            name = match[match.lastindex or 0].decode()
            found[name] = found.get(name, 0) + 1
    return tuple(Asked(name, CODE, count, None, where, "tensorflow") for name, count in found.items())
