"""On-disk formats: one module each, with detection, reading and writing."""

from typing import TYPE_CHECKING

from ckpttool import package_face

if TYPE_CHECKING:
    from ckpttool.formats.probe import Format as Format, OutputFile as OutputFile, Probe as Probe
    from ckpttool.formats.pickle_signatures import find_pickle_format as find_pickle_format
    from ckpttool.formats.embedded_tree import (
        assign_names as assign_names,
        decode_tree as decode_tree,
        encode_tree as encode_tree,
    )
    from ckpttool.formats.detect import open_checkpoint as open_checkpoint, resolve as resolve
    from ckpttool.formats.hdf5 import Hdf5Dataset as Hdf5Dataset, fletcher32 as fletcher32
    from ckpttool.formats.keras_config import (
        KerasConfig as KerasConfig,
        layer_variables as layer_variables,
    )
    from ckpttool.formats.keras_h5 import place_tree as place_tree
    from ckpttool.formats.keras_tree import (
        TrainedVariable as TrainedVariable,
        named_leaves as named_leaves,
        order_from_slots as order_from_slots,
    )
    from ckpttool.formats.tf_bundle import tree_from_graph as tree_from_graph
    from ckpttool.formats.tf_common import (
        CheckpointState as CheckpointState,
        VariableInfo as VariableInfo,
        count_adam_steps as count_adam_steps,
        plain_facts as plain_facts,
        tree_by_name as tree_by_name,
    )
    from ckpttool.formats.tf_object_graph import slot_path as slot_path

package_face()
