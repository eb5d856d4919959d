"""RL libraries: the canonical agent, recognition, and one table per library."""

from typing import TYPE_CHECKING

from ckpttool.core import package_face

# Public names, imported from their modules on first use.

if TYPE_CHECKING:
    from ckpttool.libraries.activation_orders import OrderTracer, UntraceableError, UntracedActivation
    from ckpttool.libraries.optimizers_write import TorchOptimizerWriter
    from ckpttool.libraries.recognize import LayoutTable, bind, may_recognize, recognize_tree
    from ckpttool.libraries.schema import (
        AgentMetadata,
        ObservationNormalizer,
        PolicyEncoder,
        RecognizedAgent,
        add_targets,
        canonical_setting_path,
        canonical_slot_path,
        matches_action_map,
    )
    from ckpttool.libraries.td3 import plan_torch

__all__ = [
    "AgentMetadata",
    "LayoutTable",
    "ObservationNormalizer",
    "OrderTracer",
    "PolicyEncoder",
    "RecognizedAgent",
    "TorchOptimizerWriter",
    "UntraceableError",
    "UntracedActivation",
    "add_targets",
    "bind",
    "canonical_setting_path",
    "canonical_slot_path",
    "matches_action_map",
    "may_recognize",
    "plan_torch",
    "recognize_tree",
]

_HOMES = {
    "AgentMetadata": "schema",
    "LayoutTable": "recognize",
    "ObservationNormalizer": "schema",
    "OrderTracer": "activation_orders",
    "PolicyEncoder": "schema",
    "RecognizedAgent": "schema",
    "TorchOptimizerWriter": "optimizers_write",
    "UntraceableError": "activation_orders",
    "UntracedActivation": "activation_orders",
    "add_targets": "schema",
    "bind": "recognize",
    "canonical_setting_path": "schema",
    "canonical_slot_path": "schema",
    "matches_action_map": "schema",
    "may_recognize": "recognize",
    "plan_torch": "td3",
    "recognize_tree": "recognize",
}

__getattr__, __dir__ = package_face(__name__, _HOMES)
