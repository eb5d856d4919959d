"""Mappings between trees: rules with inverses, layer kinds, filling a model."""

import importlib
from typing import TYPE_CHECKING, Any

# Names for import by other programs; their files are imported on first use.

if TYPE_CHECKING:
    from ckpttool.mapping.flattening import plan_to_torch
    from ckpttool.mapping.layers import convert_layer, find_layers
    from ckpttool.mapping.rules import (
        AxisSlice,
        BlockOrder,
        Cast,
        Chain,
        ChannelOrder,
        ConcatPart,
        MappingReport,
        Move,
        Permute,
        Plan,
        Reshape,
        Rule,
        Scale,
        SumTerm,
        ToTensor,
        ToValue,
        apply_plan,
        compose_plans,
        compose_rules,
        constant_tensor,
        is_part,
        merge_parts,
        parse_rule,
        permute_array,
        slice_rule,
    )
    from ckpttool.mapping.solver import LayerCandidate, Solution, add_call_places, parse_name_step, solve
    from ckpttool.mapping.user_rules import RuleFile, apply_rules, load_rules
    from ckpttool.mapping.wrappers import plan_state_dicts, unwrap_names, wrap_name

__all__ = [
    "AxisSlice",
    "BlockOrder",
    "Cast",
    "Chain",
    "ChannelOrder",
    "ConcatPart",
    "LayerCandidate",
    "MappingReport",
    "Move",
    "Permute",
    "Plan",
    "Reshape",
    "Rule",
    "RuleFile",
    "Scale",
    "Solution",
    "SumTerm",
    "ToTensor",
    "ToValue",
    "add_call_places",
    "apply_plan",
    "apply_rules",
    "compose_plans",
    "compose_rules",
    "constant_tensor",
    "convert_layer",
    "find_layers",
    "is_part",
    "load_rules",
    "merge_parts",
    "parse_name_step",
    "parse_rule",
    "permute_array",
    "plan_state_dicts",
    "plan_to_torch",
    "slice_rule",
    "solve",
    "unwrap_names",
    "wrap_name",
]

_HOMES = {
    "AxisSlice": "rules",
    "BlockOrder": "rules",
    "Cast": "rules",
    "Chain": "rules",
    "ChannelOrder": "rules",
    "ConcatPart": "rules",
    "LayerCandidate": "solver",
    "MappingReport": "rules",
    "Move": "rules",
    "Permute": "rules",
    "Plan": "rules",
    "Reshape": "rules",
    "Rule": "rules",
    "RuleFile": "user_rules",
    "Scale": "rules",
    "Solution": "solver",
    "SumTerm": "rules",
    "ToTensor": "rules",
    "ToValue": "rules",
    "add_call_places": "solver",
    "apply_plan": "rules",
    "apply_rules": "user_rules",
    "compose_plans": "rules",
    "compose_rules": "rules",
    "constant_tensor": "rules",
    "convert_layer": "layers",
    "find_layers": "layers",
    "is_part": "rules",
    "load_rules": "user_rules",
    "merge_parts": "rules",
    "parse_name_step": "solver",
    "parse_rule": "rules",
    "permute_array": "rules",
    "plan_state_dicts": "wrappers",
    "plan_to_torch": "flattening",
    "slice_rule": "rules",
    "solve": "solver",
    "unwrap_names": "wrappers",
    "wrap_name": "wrappers",
}


def __getattr__(name: str) -> Any:
    """Import a name from its file on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> "list[str]":
    """Return the names."""
    return __all__
