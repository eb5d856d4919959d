"""Which format a pickled file belongs to, from its first bytes; nothing is unpickled."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

from ckpttool.formats.probe import Probe

Owner = Literal["stable_baselines2", "rllib", "pickle"]

# Lib/pickle.py: protocols 2 and above begin with PROTO and their number.
_PROTOCOL = re.compile(rb"\x80[\x02-\x05]")
# torch/serialization.py, MAGIC_NUMBER: the form before the zip file begins with this pickled integer.
_TORCH = bytes.fromhex("8a0a6cfc9c46f9206aa85019")
# ray/rllib/utils/checkpoints.py, get_checkpoint_info: names of files of version 0.1, and of later ones.
CHECKPOINT = re.compile(r"checkpoint-\d+")
_STATES = ("algorithm_state.pkl", "policy_state.pkl", "module_state.pkl")
# Both libraries name their own classes early in the file: SB2 pickles its data before the weights (and each
# of its agents has an attribute of this name, stable_baselines/common/base_class.py), RLlib its filters.
_RLLIB = re.compile(rb"ray\.rllib\.")
_SB2 = re.compile(rb"stable_baselines\.|_vectorize_action")
_LOOKED_AT = 1 << 20


def owner(probe: Probe) -> Owner | None:
    """Return which format reads the file; None when it is no pickle that starts with its protocol."""
    if _PROTOCOL.match(probe.head) is None or _TORCH in probe.head[:32]:
        return None
    if CHECKPOINT.fullmatch(probe.name) or probe.name in _STATES:
        return "rllib"
    return _by_content(probe)


@lru_cache(maxsize=4)
def _by_content(probe: Probe) -> Owner:
    # Three formats ask about one probe in a row.
    try:
        with open(probe.path, "rb") as stream:
            data = stream.read(min(probe.size, _LOOKED_AT))
    except OSError:
        return "pickle"
    if _RLLIB.search(data):
        return "rllib"
    return "stable_baselines2" if _SB2.search(data) else "pickle"
