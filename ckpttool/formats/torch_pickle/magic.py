"""How the files begin that torch.save wrote; every command asks, so nothing heavy is imported here.

Source: torch/serialization.py (MAGIC_NUMBER, _legacy_save); Lib/pickle.py for a number in each protocol.
"""

from __future__ import annotations

import re

ZIP = b"PK\x03\x04"
MAGIC = 0x1950A86A20F9469CFC6C
# The magic number as a pickle of its own. From protocol 4 on the pickle may be framed.
STREAM = re.compile(
    rb"\x80[\x02-\x05](?:\x95.{8})?\x8a\x0a%b|L%dL?\n" % (re.escape(MAGIC.to_bytes(10, "little")), MAGIC),
    re.DOTALL,
)
STREAM_LENGTH = 32
