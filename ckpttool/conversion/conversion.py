"""Choose the kind of conversion: to a format, to ONNX or into a user's model."""

from __future__ import annotations

from dataclasses import replace

from ckpttool.conversion.format_conversion import convert_to_format
from ckpttool.conversion.options import ConversionOptions, parse_request, require_compatible
from ckpttool.conversion.plan import ConversionResult
from ckpttool.conversion.targets import (
    EXPORTS,
    complete_hints,
    infer_target_word,
    parse_target_kind,
    sharded_kind,
)
from ckpttool.core.atomic_write import Progress, ignore_progress
from ckpttool.evaluation.agent_facts import add_environment


def run_conversion(
    source: str, target: str, options: ConversionOptions, progress: Progress = ignore_progress
) -> ConversionResult:
    """Convert to a format, to ONNX or into a user's model, as the options state."""
    with complete_hints(target):
        exported = infer_target_word(target, options.to) in EXPORTS
        require_compatible(options, exported=exported)
        facts = add_environment(options.facts, options.env)
        if exported:
            # Exports import modules that no other conversion needs.
            from ckpttool.conversion.export import export

            return export(source, target, replace(options, facts=facts))
        if options.like is not None:
            # A model is matched layer by layer.
            from ckpttool.conversion.filled_model import convert_into_model

            return convert_into_model(source, target, options.like, options, progress)
        kind = parse_target_kind(target, options.to)
        spread = options.jobs is not None or options.ray is not None
        kind = sharded_kind(target, kind, options.shard_size, options.shards, spread)
        return convert_to_format(source, target, parse_request(kind, options), facts, progress)
