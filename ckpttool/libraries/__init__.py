"""RL libraries: the canonical agent, recognition, and one table per library."""

from typing import TYPE_CHECKING

from ckpttool import package_face

if TYPE_CHECKING:
    from ckpttool.libraries.optimizers_write import TorchOptimizerWriter as TorchOptimizerWriter
    from ckpttool.libraries.recognize import (
        LayoutTable as LayoutTable,
        may_recognize as may_recognize,
        recognize_tree as recognize_tree,
    )
    from ckpttool.libraries.binding import bind as bind
    from ckpttool.libraries.schema import (
        AgentMetadata as AgentMetadata,
        ObservationNormalizer as ObservationNormalizer,
        PolicyEncoder as PolicyEncoder,
        RecognizedAgent as RecognizedAgent,
        add_targets as add_targets,
        canonical_setting_path as canonical_setting_path,
        canonical_slot_path as canonical_slot_path,
        layer_widths as layer_widths,
        matches_action_map as matches_action_map,
    )
    from ckpttool.libraries.td3 import plan_torch as plan_torch

package_face()
