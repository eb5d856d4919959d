"""The code beside a converted file: of the networks of its agent, else of the graph of its source."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.conversion import loading_code
from ckpttool.conversion.model_code import derive_code_settings, require_code_target, write_code
from ckpttool.conversion.options import STANDARD_OUTPUT, ConversionRequest
from ckpttool.conversion.targets import find_target_name
from ckpttool.core import sidecar, urls
from ckpttool.core.atomic_write import require_new, write_file
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkpttoolError, UnsupportedError, UsageError
from ckpttool.core.sidecar import Sidecar
from ckpttool.evaluation.restore import VerifiedSidecar, build_agent, recognize_playable_agent
from ckpttool.graphs.graph import read_graph
from ckpttool.libraries.recognize import SAVER_FORMATS, recognize_checkpoint
from ckpttool.libraries.single_networks import read_action_graph
from ckpttool.version import __version__

if TYPE_CHECKING:
    from ckpttool.conversion.format_conversion import TargetWriter
    from ckpttool.conversion.graph_code import PolicyCalls
    from ckpttool.graphs.graph import Graph


def require_code_file(request: ConversionRequest, checkpoint: Checkpoint) -> None:
    """Raise UnsupportedError or FileExistsError where `code` cannot be written, before anything else is."""
    require_code_target(request.kind)
    code = str(request.options.code)
    if code != STANDARD_OUTPUT and not request.options.dry_run:
        require_new(code, checkpoint.files, force=request.options.force)


def write_code_file(
    code: str, target: str, request: ConversionRequest, checkpoint: Checkpoint
) -> tuple[str, ...]:
    """Write the code of the written networks; return the lines that use it."""
    file = str(request.options.code)
    write_file(file, code.encode(), force=request.options.force, sources=checkpoint.files)
    name, _ = os.path.splitext(os.path.basename(file))
    name = name if loading_code.is_word(name) else "CODE"
    states = ", *states" * ("\nSTATES = " in code)
    act = (f"actions{states} = {name}.act(model, observations)",) * ("\ndef act(" in code)
    return (f"import {name}", f"model = {name}.load({loading_code.python_literal(target)})", *act)


def format_code(
    writer: TargetWriter, record: Sidecar, digests: tuple[str | None, str], checkpoint: Checkpoint
) -> str:
    """Return the code of the networks in a written file: of its agent, else of the source's graph.

    `record` is the file's sidecar, `digests` are those of source and file, `checkpoint` is the file under its
    temporary name. Raise UnsupportedError without either, and for what cannot be written exactly: the error
    names the source, whose networks these are.
    """
    try:
        return _network_code(writer, record, digests, checkpoint)
    except CkpttoolError as error:
        error.file = urls.display_url(writer.checkpoint.path)
        if error.hint is None or os.path.basename(checkpoint.path) in error.hint:
            error.hint = "leave out --code"
        raise


def _network_code(
    writer: TargetWriter, record: Sidecar, digests: tuple[str | None, str], checkpoint: Checkpoint
) -> str:
    source = urls.display_url(writer.checkpoint.path)
    network = writer.request.options.network
    if network is not None and writer.plan.binding is not None:
        raise UsageError("--network does not choose the code of an agent, which has all its networks")
    try:
        if network is None:
            return _agent_code(writer, record, digests, checkpoint, source)
        refusal: CkpttoolError = UnsupportedError(
            "--code cannot write one network of a file that records no computation", found=network
        )
    except (UnsupportedError, UsageError) as error:
        refusal = error
    from ckpttool.conversion.graph_code import GraphPlan, write_graph_code
    from ckpttool.conversion.graph_texts import LANGUAGES

    about = (
        f"Written by ckpttool {__version__} from {source} (sha256 {digests[0]})",
        f"for {os.path.basename(writer.target)} (sha256 {digests[1]}).",
        *sidecar.describe_decisions(writer.ledger),
    )
    plan = GraphPlan(writer.plan.ready.tree, writer.plan.moves, checkpoint.tree, writer.places)
    target, refused = find_target_name(writer.request.kind), False
    readers = _READERS if network is None else (_action_graph, _policy_graph)
    for read in readers if target in LANGUAGES else ():
        try:
            if (computation := read(writer)) is not None:
                return write_graph_code(computation[0], plan, target, about, computation[1])
        except (UnsupportedError, UsageError) as error:
            # The first graph's refusal stays, unless an option gives what the second lacks.
            other = refused and not isinstance(error, UsageError)
            refusal, refused = refusal if other else error, True
    raise refusal


def _agent_code(
    writer: TargetWriter,
    record: Sidecar,
    digests: tuple[str | None, str],
    checkpoint: Checkpoint,
    source: str,
) -> str:
    if writer.plan.binding is not None and writer.plan.binding.facts.one_hot:
        # The target's layout does not state how they are encoded.
        raise UnsupportedError("--code cannot write networks of discrete observations without a policy")
    file = replace(checkpoint, path=writer.target)
    # What its own file contains is read from under its temporary name.
    binding = recognize_checkpoint(file) or recognize_playable_agent(checkpoint)
    if binding is None:
        raise UnsupportedError(
            "--code needs an agent, a policy or a recorded computation",
            hint="leave out --code, or fill your own model with --like MODULE:FACTORY",
        )
    agent = build_agent(checkpoint, binding, VerifiedSidecar(record))
    known = {entry.value for entry in agent.ledger}
    more = (
        item for item in writer.ledger if item.open or (item.use == "assumed" and item.value not in known)
    )
    ledger = sidecar.merge_entries(agent.ledger, more)
    return write_code(replace(agent, checkpoint=file, ledger=ledger), writer.request.kind, source, digests)


def _model_graph(writer: TargetWriter) -> tuple[Graph, None] | None:
    """Return what a source that is no agent computes, if its file states it."""
    graph = read_graph(writer.checkpoint) if writer.plan.binding is None else None
    return None if graph is None else (graph, None)


def _action_graph(writer: TargetWriter) -> tuple[Graph, PolicyCalls | None] | None:
    """Return what one output of the source computes, of a program or of the outputs that `network` names.

    A policy whose outputs are the actions has a function `act`.
    """
    from ckpttool.conversion.graph_code import PolicyCalls

    checkpoint, network = writer.checkpoint, writer.request.options.network
    if writer.plan.binding is not None or (network is None and checkpoint.format not in SAVER_FORMATS):
        return None
    graph = read_action_graph(checkpoint, network or "actor")
    if graph is None:
        return None
    binding = recognize_playable_agent(checkpoint, network=network or "actor")
    try:
        agent = None if binding is None else build_agent(checkpoint, binding, writer.own)
        settings = None if agent is None else derive_code_settings(agent)[0]
    except (UnsupportedError, UsageError):
        settings = None
    # Other maps are not in the graph: the model returns what it computes, and there is no `act`.
    acts = settings is not None and settings.choices is None and settings.head in ("identity", "unit_tanh")
    return graph, PolicyCalls("", (None,)) if acts else None


def _policy_graph(writer: TargetWriter) -> tuple[Graph, PolicyCalls] | None:
    """Return what the source's policy computes and how it is called, with the facts that are known."""
    from ckpttool.conversion.policy_graph import read_policy_graph

    binding = recognize_playable_agent(writer.checkpoint, network=writer.request.options.network or "actor")
    if binding is None:
        return None
    return read_policy_graph(build_agent(writer.checkpoint, binding, writer.own))


# What states a computation, the first one first.
_READERS = (_action_graph, _model_graph, _policy_graph)
