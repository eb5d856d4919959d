"""Which format a pickled file belongs to, from its first bytes; nothing is unpickled."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from typing import Literal

from ckpttool import places
from ckpttool.formats.probe import Probe

Owner = Literal["stable_baselines2", "rllib", "pytorch", "pytorch_dcp", "d3rlpy", "pickle"]

# Lib/pickle.py: protocols 2 and above begin with PROTO and their number.
_PROTOCOL = re.compile(rb"\x80[\x02-\x05]")
# Protocols 0 and 1 begin with the first value: a mark, an empty container, or the name of a class.
_OLD = (b"(", b"]", b"}", b")", b"c")
_SUFFIXES = (".pkl", ".pickle", ".p")
# torch/serialization.py, MAGIC_NUMBER: the form before the zip file begins with this pickled integer.
_TORCH = bytes.fromhex("8a0a6cfc9c46f9206aa85019")
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


def owner(probe: Probe) -> Owner | None:
    """Return which format reads the file; None when it is no pickle, or one of torch's own forms."""
    if _TORCH in probe.head[:32] or _is_length(probe.head):
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


def _is_old(probe: Probe) -> bool:
    """Say whether this is a pickle of protocol 0 or 1, Python 2's default: only its name and ends tell."""
    named = os.path.splitext(probe.name)[1].lower() in _SUFFIXES
    return named and probe.head[:1] in _OLD and probe.tail[-1:] == b"."


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
