"""What a Keras layer's stored configuration says, as plain facts.

TensorFlow up to 1.13 saved, with every object that has a `get_config`, a string attribute OBJECT_CONFIG_JSON:
`{"class_name": CLASS, "config": CONFIG}` (Checkpointable._gather_saveables_for_checkpoint in
tensorflow/python/training/checkpointable/base.py; tensorflow/python/util/serialization.py). Later versions
keep the constant and write nothing. It is JSON data here and nothing else: no class is looked up, and nothing
in it is run.
"""

from __future__ import annotations

from ckpttool import documents
from ckpttool.formats.keras_facts import class_of, facts
from ckpttool.tree import Container

ATTRIBUTE = "OBJECT_CONFIG_JSON"


def container(data: bytes) -> Container | None:
    """Return the module that a configuration describes, None if it holds none (an object without a class).

    Raise FormatError when it is not a JSON object.
    """
    found = documents.parse(data, "the configuration")
    name, config = class_of(found.get("class_name")), found.get("config")
    return Container("module", name, facts(config)) if name and isinstance(config, dict) else None
