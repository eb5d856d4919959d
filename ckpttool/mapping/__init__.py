"""Mappings between trees: rules with inverses, layer kinds, filling a model."""

from typing import TYPE_CHECKING

from ckpttool import package_face

if TYPE_CHECKING:
    from ckpttool.mapping.conversion_by_kinds import plan_to_torch as plan_to_torch
    from ckpttool.mapping.layers import convert_layer as convert_layer, find_layers as find_layers
    from ckpttool.mapping.rules import (
        AxisSlice as AxisSlice,
        BlockOrder as BlockOrder,
        Cast as Cast,
        Chain as Chain,
        ChannelOrder as ChannelOrder,
        ConcatPart as ConcatPart,
        MappingReport as MappingReport,
        Move as Move,
        Permute as Permute,
        Plan as Plan,
        Reshape as Reshape,
        Rule as Rule,
        Scale as Scale,
        SumTerm as SumTerm,
        ToTensor as ToTensor,
        ToValue as ToValue,
        apply_plan as apply_plan,
        compose_plans as compose_plans,
        compose_rules as compose_rules,
        constant_tensor as constant_tensor,
        is_part as is_part,
        merge_parts as merge_parts,
        parse_rule as parse_rule,
        permute_array as permute_array,
        slice_rule as slice_rule,
    )
    from ckpttool.mapping.solver import (
        LayerCandidate as LayerCandidate,
        Solution as Solution,
        add_call_places as add_call_places,
        parse_name_step as parse_name_step,
        solve as solve,
    )
    from ckpttool.mapping.user_rules import (
        RuleFile as RuleFile,
        apply_rules as apply_rules,
        load_rules as load_rules,
    )
    from ckpttool.mapping.wrappers import unwrap_names as unwrap_names, wrap_name as wrap_name
    from ckpttool.mapping.pickled_modules import plan_state_dicts as plan_state_dicts

package_face()
