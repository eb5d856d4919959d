"""First bytes of pickled files, by which their formats differ; nothing is unpickled.

Every command checks them, so this module imports nothing heavy. Sources: torch/serialization.py
(MAGIC_NUMBER, _legacy_save); Lib/pickle.py for a number in each protocol.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from ckpttool.core import deferred, filesystem
from ckpttool.formats.probe import HEAD, Probe

if TYPE_CHECKING:
    from ckpttool.encodings.pickle_reader import PickleScan


ZIP = b"PK\x03\x04"
MAGIC = 0x1950A86A20F9469CFC6C
# The magic number as a separate pickle. From protocol 4 on the pickle may be framed.
STREAM = deferred.compile(
    rb"\x80[\x02-\x05](?:\x95.{8})?\x8a\x0a%b|L%dL?\n" % (re.escape(MAGIC.to_bytes(10, "little")), MAGIC),
    re.DOTALL,
)
STREAM_LENGTH = 32


Owner = Literal["stable_baselines2", "rllib", "pytorch", "pytorch_dcp", "d3rlpy", "pickle"]

# Lib/pickle.py: protocols 2 and above begin with PROTO and their number; unpicklers also accept 0 and 1
# there.
_PROTOCOL = deferred.compile(rb"\x80[\x00-\x05]")
# Protocols 0 and 1 begin with the first value: a mark, an empty container, or a class name.
_OLD = (b"(", b"]", b"}", b")", b"c")
_SUFFIXES = (".pkl", ".pickle", ".p")
# Opcodes that need nothing on the stack: a pickle without PROTO begins with one of them. PERSID is excluded,
# because only torch could load it, and does not; so are the first bytes of other file types.
_STARTS = frozenset(b"(])}cNIJKLMFGSTUVXBCi\x82\x83\x84\x88\x89\x8a\x8b\x8c\x8d\x8e\x8f\x95\x96")
_OTHERS = (b"BZh", b"\x89HDF\r\n")
# BINSTRING, BINUNICODE and BINBYTES: the length of the following data, in four bytes.
_LENGTHY = b"TXB"
# ray/rllib/utils/checkpoints.py, get_checkpoint_info: file names of version 0.1 and later versions.
CHECKPOINT = deferred.compile(r"checkpoint-\d+")
_STATES = ("algorithm_state.pkl", "policy_state.pkl", "module_state.pkl")
# torch/serialization.py, _save: the pickle of an unpacked archive, and the files next to it.
_UNPACKED, _BESIDE = "data.pkl", {"data", "version"}
# torch/distributed/checkpoint/metadata.py: the pickle begins with the name of its class.
_DCP = deferred.compile(rb".{0,16}torch\.distributed\.checkpoint\.metadata.{1,8}Metadata", re.DOTALL)
# d3rlpy/base.py, dump_learnable: a dict whose first entry is `torch`, in bytes (protocols 3, 4 and above, and
# as ckpttool writes it, without memoizing the dict).
_D3 = deferred.compile(
    rb"\x80.(\x95.{8})?\}(\x94|q\0)?\((\x8c\x05|X\x05\0\0\0)torch(\x94|q[\0\x01])(\x95.{8})?[BC\x8e]",
    re.DOTALL,
)
# The module of joblib's arrays (joblib/numpy_pickle.py).
JOBLIB = b"joblib.numpy_pickle"
# Names of both libraries' own classes occur early in the file: SB2 pickles its data before the weights (and
# each of its agents has an attribute of this name, stable_baselines/common/base_class.py), RLlib its filters.
_RLLIB = deferred.compile(rb"ray\.rllib\.")
_SB2 = deferred.compile(rb"stable_baselines\.|_vectorize_action")
_LOOKED_AT = 1 << 20
_GROWTH = 16
_NAME = deferred.compile(r"[^\W\d][\w.<>]*")


def find_pickle_format(probe: Probe) -> Owner | None:
    """Return the format that reads the file; None if it is not a pickle, or one of torch's own forms."""
    if STREAM.match(probe.head) or _is_safetensors_length(probe.head):
        return None
    if _PROTOCOL.match(probe.head) is None:
        return "pickle" if _lacks_proto(probe) else None
    if CHECKPOINT.fullmatch(probe.name) or probe.name in _STATES:
        return "rllib"
    if probe.name == _UNPACKED and _BESIDE & probe.names:
        return "pytorch"
    if _DCP.match(probe.head):
        return "pytorch_dcp"
    if _D3.match(probe.head):
        return "d3rlpy"
    return _find_by_content(probe)


@lru_cache(maxsize=4)
def _lacks_proto(probe: Probe) -> bool:
    """Return whether this is a pickle without PROTO: protocol 0 or 1, the default of Python 2.

    The check uses the opcodes, not the file name. Text may parse as a few opcodes, so they must reach
    STOP and build a container or an object, or call a standard library function that acts before it
    fails.
    """
    if not may_be_pickle(probe.head, probe.size):
        return False
    named = os.path.splitext(probe.name)[1].lower() in _SUFFIXES
    if named and probe.head[:1] in _OLD and probe.tail[-1:] == b".":
        return True
    return is_pickle(*scan_head(probe.start, probe.size), probe.size)


def may_be_pickle(head: bytes, size: int) -> bool:
    """Return whether a file of `size` bytes with this start may be a pickle without PROTO."""
    if not head or head[0] not in _STARTS or head.startswith(_OTHERS):
        return False
    return head[0] not in _LENGTHY or 5 + int.from_bytes(head[1:5], "little") <= size


def scan_head(start: Callable[[int], bytes], size: int, length: int = HEAD) -> tuple[PickleScan, bytes]:
    """Scan the opcodes at the start of a file of `size` bytes, over as many bytes as they need.

    `start` returns the first bytes of the file; `length` is the number of bytes for the first attempt.
    Return the scan and the scanned bytes.
    """
    # Not a top-level import: every command runs format detection.
    from ckpttool.encodings.pickle_reader import scan_pickle

    while True:
        data = start(min(length, size))
        scan = scan_pickle(data)
        if not scan.cut or length >= size or len(data) < length:
            return scan, data
        length *= _GROWTH


def is_pickle(scan: PickleScan, data: bytes, size: int) -> bool:
    """Return whether the scanned bytes begin a pickle, not text that looks like one."""
    names = [reference.name for reference in scan.code_references]
    real = bool(names) and all(map(_NAME.fullmatch, names))
    if scan.end is None:
        from ckpttool.core.code_references import CODE  # most files are no pickles

        return real and any(name.verdict == CODE and name.calls for name in scan.code_references)
    if names:
        return real
    plain = isinstance(scan.value, list | dict | tuple)
    return plain and len(data) == size and not data[scan.end :].strip()


def _is_safetensors_length(head: bytes) -> bool:
    # A safetensors header whose length begins like a protocol number; no pickle continues this way.
    return head[4:9] == b"\0\0\0\0{"


@lru_cache(maxsize=4)
def _find_by_content(probe: Probe) -> Owner:
    # Three formats check the same probe one after the other.
    try:
        data = filesystem.read_bytes(probe.path, 0, _LOOKED_AT)
    except OSError:
        return "pickle"
    if _RLLIB.search(data):
        return "rllib"
    return "stable_baselines2" if _SB2.search(data) else "pickle"
