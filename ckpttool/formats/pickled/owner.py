"""Which format a pickled file belongs to, from its first bytes; nothing is unpickled."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from ckpttool import places
from ckpttool.formats.probe import HEAD, Probe
from ckpttool.formats.torch_pickle import magic
from ckpttool.wire.asked import CODE

if TYPE_CHECKING:
    from ckpttool.wire.pickle_reader import Scan

Owner = Literal["stable_baselines2", "rllib", "pytorch", "pytorch_dcp", "d3rlpy", "pickle"]

# Lib/pickle.py: protocols 2 and above begin with PROTO and their number; unpicklers take 0 and 1 there too.
_PROTOCOL = re.compile(rb"\x80[\x00-\x05]")
# Protocols 0 and 1 begin with the first value: a mark, an empty container, or the name of a class.
_OLD = (b"(", b"]", b"}", b")", b"c")
_SUFFIXES = (".pkl", ".pickle", ".p")
# Opcodes that need nothing on the stack: with one of them a pickle without PROTO begins. PERSID is left out,
# which only torch could take, and does not; so are bytes that stand at the start of other files.
_STARTS = frozenset(b"(])}cNIJKLMFGSTUVXBCi\x82\x83\x84\x88\x89\x8a\x8b\x8c\x8d\x8e\x8f\x95\x96")
_OTHERS = (b"BZh", b"\x89HDF\r\n")
# BINSTRING, BINUNICODE and BINBYTES: the length of what follows, in four bytes.
_LENGTHY = b"TXB"
# ray/rllib/utils/checkpoints.py, get_checkpoint_info: names of files of version 0.1, and of later ones.
CHECKPOINT = re.compile(r"checkpoint-\d+")
_STATES = ("algorithm_state.pkl", "policy_state.pkl", "module_state.pkl")
# torch/serialization.py, _save: the pickle of an archive that was unpacked, and what lies beside it.
_UNPACKED, _BESIDE = "data.pkl", {"data", "version"}
# torch/distributed/checkpoint/metadata.py: its pickle begins with the name of its class.
_DCP = re.compile(rb".{0,16}torch\.distributed\.checkpoint\.metadata.{1,8}Metadata", re.DOTALL)
# d3rlpy/base.py, dump_learnable: a dict whose first entry is `torch`, in bytes (protocols 3, 4 and above, and
# as we write it, without remembering the dict).
_D3 = re.compile(
    rb"\x80.(\x95.{8})?\}(\x94|q\0)?\((\x8c\x05|X\x05\0\0\0)torch(\x94|q[\0\x01])(\x95.{8})?[BC\x8e]",
    re.DOTALL,
)
# Both libraries name their own classes early in the file: SB2 pickles its data before the weights (and each
# of its agents has an attribute of this name, stable_baselines/common/base_class.py), RLlib its filters.
_RLLIB = re.compile(rb"ray\.rllib\.")
_SB2 = re.compile(rb"stable_baselines\.|_vectorize_action")
_LOOKED_AT = 1 << 20
_GROWTH = 16
_NAME = re.compile(r"[^\W\d][\w.<>]*")


def owner(probe: Probe) -> Owner | None:
    """Return which format reads the file; None when it is no pickle, or one of torch's own forms."""
    if magic.STREAM.match(probe.head) or _is_length(probe.head):
        return None
    if _PROTOCOL.match(probe.head) is None:
        return "pickle" if _is_old(probe) else None
    if CHECKPOINT.fullmatch(probe.name) or probe.name in _STATES:
        return "rllib"
    if probe.name == _UNPACKED and _BESIDE & probe.names:
        return "pytorch"
    if _DCP.match(probe.head):
        return "pytorch_dcp"
    if _D3.match(probe.head):
        return "d3rlpy"
    return _by_content(probe)


@lru_cache(maxsize=4)
def _is_old(probe: Probe) -> bool:
    """Say whether this is a pickle without PROTO: of protocol 0 or 1, Python 2's default.

    Its opcodes tell, whatever its name is. Text may make sense as a few opcodes: it must go on to STOP and
    make a container or an object, or call something of the standard library that acts before it fails.
    """
    if not may_begin(probe.head, probe.size):
        return False
    named = os.path.splitext(probe.name)[1].lower() in _SUFFIXES
    if named and probe.head[:1] in _OLD and probe.tail[-1:] == b".":
        return True
    return is_pickle(*grown(probe.start, probe.size), probe.size)


def may_begin(head: bytes, size: int) -> bool:
    """Say whether a file of `size` bytes with this start may be a pickle without PROTO."""
    if not head or head[0] not in _STARTS or head.startswith(_OTHERS):
        return False
    return head[0] not in _LENGTHY or 5 + int.from_bytes(head[1:5], "little") <= size


def grown(start: Callable[[int], bytes], size: int, length: int = HEAD) -> tuple[Scan, bytes]:
    """Run the opcodes at the start of a file of `size` bytes, over as many bytes as they take.

    `start` returns the first bytes of the file; `length` is how many are tried first. Return the scan, and
    the bytes that it was made of.
    """
    # Not at the top: every command asks who owns a file.
    from ckpttool.wire.pickle_reader import scan

    while True:
        data = start(min(length, size))
        found = scan(data)
        if not found.cut or length >= size or len(data) < length:
            return found, data
        length *= _GROWTH


def is_pickle(found: Scan, data: bytes, size: int) -> bool:
    """Say whether the bytes that were scanned begin a pickle, and not a text that looks like one."""
    names = [each.name for each in found.asked]
    real = bool(names) and all(map(_NAME.fullmatch, names))
    if found.end is None:
        return real and any(each.verdict == CODE and each.calls for each in found.asked)
    if names:
        return real
    plain = isinstance(found.value, list | dict | tuple)
    return plain and len(data) == size and not data[found.end :].strip()


def _is_length(head: bytes) -> bool:
    # A safetensors header whose length begins like a protocol's number: no pickle goes on so.
    return head[4:9] == b"\0\0\0\0{"


@lru_cache(maxsize=4)
def _by_content(probe: Probe) -> Owner:
    # Three formats ask about one probe in a row.
    try:
        data = places.content(probe.path, 0, _LOOKED_AT)
    except OSError:
        return "pickle"
    if _RLLIB.search(data):
        return "rllib"
    return "stable_baselines2" if _SB2.search(data) else "pickle"
