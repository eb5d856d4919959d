"""On-disk formats: one module each, with detection, reading and writing."""

from typing import TYPE_CHECKING

from ckpttool.core import package_face

# Public names, imported from their modules on first use.

if TYPE_CHECKING:
    from ckpttool.formats.common import (
        Format,
        OutputFile,
        Probe,
        assign_names,
        decode_tree,
        encode_tree,
        find_pickle_format,
    )
    from ckpttool.formats.detect import open_checkpoint, resolve
    from ckpttool.formats.hdf5 import Hdf5Dataset, fletcher32
    from ckpttool.formats.keras_config import KerasConfig, layer_variables
    from ckpttool.formats.keras_h5 import place_tree
    from ckpttool.formats.keras_tree import TrainedVariable, named_leaves, order_from_slots
    from ckpttool.formats.tf_bundle import tree_from_graph
    from ckpttool.formats.tf_common import (
        CheckpointState,
        VariableInfo,
        count_adam_steps,
        plain_facts,
        tree_by_name,
    )
    from ckpttool.formats.tf_object_graph import slot_path

__all__ = [
    "CheckpointState",
    "Format",
    "Hdf5Dataset",
    "KerasConfig",
    "OutputFile",
    "Probe",
    "TrainedVariable",
    "VariableInfo",
    "assign_names",
    "count_adam_steps",
    "decode_tree",
    "encode_tree",
    "find_pickle_format",
    "fletcher32",
    "layer_variables",
    "named_leaves",
    "open_checkpoint",
    "order_from_slots",
    "place_tree",
    "plain_facts",
    "resolve",
    "slot_path",
    "tree_by_name",
    "tree_from_graph",
]

_HOMES = {
    "CheckpointState": "tf_common",
    "Format": "common",
    "Hdf5Dataset": "hdf5",
    "KerasConfig": "keras_config",
    "OutputFile": "common",
    "Probe": "common",
    "TrainedVariable": "keras_tree",
    "VariableInfo": "tf_common",
    "count_adam_steps": "tf_common",
    "assign_names": "common",
    "decode_tree": "common",
    "encode_tree": "common",
    "find_pickle_format": "common",
    "fletcher32": "hdf5",
    "layer_variables": "keras_config",
    "named_leaves": "keras_tree",
    "open_checkpoint": "detect",
    "order_from_slots": "keras_tree",
    "place_tree": "keras_h5",
    "plain_facts": "tf_common",
    "resolve": "detect",
    "slot_path": "tf_object_graph",
    "tree_by_name": "tf_common",
    "tree_from_graph": "tf_bundle",
}

__getattr__, __dir__ = package_face(__name__, _HOMES)
