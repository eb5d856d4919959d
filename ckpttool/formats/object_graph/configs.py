"""What a Keras layer's stored configuration says, as plain facts.

TensorFlow up to 1.13 saved, with every object that has a `get_config`, a string attribute OBJECT_CONFIG_JSON:
`{"class_name": CLASS, "config": CONFIG}` (Checkpointable._gather_saveables_for_checkpoint in
tensorflow/python/training/checkpointable/base.py; tensorflow/python/util/serialization.py). Later versions
keep the constant and write nothing. It is JSON data here and nothing else: no class is looked up, and nothing
in it is run.
"""

from __future__ import annotations

import math
from typing import Any

from ckpttool import documents
from ckpttool.tree import Container

ATTRIBUTE = "OBJECT_CONFIG_JSON"
MAX_BYTES = 1 << 20  # of one configuration
# A Lambda layer's code is a long string, and no fact that a person reads.
_LONGEST = 200
_MOST = 64  # items of a list


def container(data: bytes) -> Container | None:
    """Return the module that a configuration describes, None if it holds none (an object without a class).

    Raise FormatError when it is not a JSON object.
    """
    found = documents.parse(data, "the configuration", MAX_BYTES)
    name, config = found.get("class_name"), found.get("config")
    if not isinstance(name, str) or len(name) > _LONGEST or not isinstance(config, dict):
        return None
    facts = {key: value for key, value in config.items() if len(key) <= _LONGEST and _is_fact(value)}
    if "name" in facts:
        facts = {"layer": facts.pop("name"), **facts}
    return Container("module", name, facts)


def _is_fact(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) <= _MOST and all(_is_plain(item) for item in value)
    return _is_plain(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= _LONGEST
    return (
        value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))
    )
