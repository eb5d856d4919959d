"""`convert`: map a checkpoint to another framework, write it, read it back, and leave a receipt."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

from ckpttool import ledger as ledgers
from ckpttool import plugins, sidecar, urls
from ckpttool.behind import Lane
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError, UnsupportedError, UsageError
from ckpttool.formats.probe import Format
from ckpttool.formats.resolve import open_checkpoint, other_shards
from ckpttool.leaf import Path
from ckpttool.ledger import Entries
from ckpttool.mapping import rule_file
from ckpttool.mapping.report import Report
from ckpttool.ops import evidence, knowledge, receipt, save, side_files, targets
from ckpttool.ops.agent_facts import NO_FACTS, AgentFacts
from ckpttool.ops.agent_facts import merged as merged_facts
from ckpttool.ops.digest import Digest, Overheard
from ckpttool.ops.layer_options import choices
from ckpttool.ops.loading import loading_lines
from ckpttool.ops.optimizer_options import statements
from ckpttool.ops.plain_names import Wanted
from ckpttool.ops.progress import Progress, silent
from ckpttool.ops.proof import DiffersError, Proof, as_read, prove
from ckpttool.ops.request import Request
from ckpttool.ops.restore import (
    Own,
    agent_of,
    ledger_of,
    networks,
    own_sidecar,
    playable_binding,
    policy_sizes,
)
from ckpttool.ops.route import Route, route
from ckpttool.ops.undo import Undo, undo
from ckpttool.sidecar import Sidecar
from ckpttool.writing import Output, require_new

if TYPE_CHECKING:
    from ckpttool.agents.skeleton.beside import Like
    from ckpttool.ops.export import Exported
    from ckpttool.ops.like import Filled
    from ckpttool.ops.parity import Parity

# Formats that hold arrays of any kind: what is no network is as well kept there.
_ARRAYS = frozenset(("npz", "safetensors"))


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a conversion did; `digest` is the target's (None for a dry run or a refusal).

    `written` says whether the target is there now, `parity` how the networks that were written compared,
    `model` what became of the user's own model, `load` the Python lines that load the target.
    """

    source: str
    target: str
    report: Report
    digest: str | None
    written: bool
    parity: tuple[Parity, ...] = ()
    model: Filled | None = None
    load: tuple[str, ...] = ()
    ledger: Entries = ()

    @property
    def within(self) -> bool:
        """Say whether what was compared is within its bound."""
        return all(network.within for network in self.parity)

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "source": self.source,
            "target": self.target,
            "mapped": [each.document() for each in self.report.mapped],
            "unused": list(self.report.unused),
            "missing": list(self.report.missing),
            "assumed": list(self.report.assumed),
            "ledger": ledgers.documents(self.ledger),
            "notes": list(self.report.notes),
            "parity": [network.document() for network in self.parity],
            "digest": self.digest,
            "written": self.written,
            "load": list(self.load),
            **({} if self.model is None else self.model.document()),
        }


def convert(
    source: str,
    target: str,
    *,
    to: str | None = None,
    layout: str | None = None,
    part: str | None = None,
    strip: bool = False,
    restore: bool = False,
    fold_weight_norm: bool = False,
    fold_normalizer: bool = False,
    weights: str | None = None,
    rules: str | None = None,
    l2: Sequence[str] = (),
    optimizer: Sequence[str] = (),
    kinds: Sequence[str] = (),
    flatten: Sequence[str] = (),
    unflatten: Sequence[str] = (),
    network: str | None = None,
    env: str | None = None,
    facts: AgentFacts = NO_FACTS,
    like: Like | str | None = None,
    match: Sequence[str] = (),
    accept_order: bool = False,
    from_: str | None = None,
    cast: bool = False,
    allow_missing: bool = False,
    dry_run: bool = False,
    force: bool = False,
    sync: bool = True,
    verify: bool = True,
    progress: Progress = silent,
) -> Conversion:
    """Convert the checkpoint at `source` into a new one at `target`, with its sidecar beside it.

    `part` names a path: only what lies below it is converted. `weights` is "ema" for the averaged weights
    alone, "raw" for the trained ones without them. First, `strip` takes out of names what wrappers
    put into them, `restore` puts it back as the source's sidecar says, `fold_weight_norm` makes one weight of
    a direction and a length. `fold_normalizer` makes statistics of observations part of an agent's first
    layers, for libraries that keep none. `l2` and `optimizer` say what no file does of optimizers
    (ops/optimizer_options.py; "none" leaves out their state), `kinds`, `flatten` and `unflatten` what none
    does of layers (ops/layer_options.py). `rules` is a TOML file of the user's own rules. Nothing
    is written when something is unmapped (unless `allow_missing`) or on `dry_run`. The target is written
    beside, read back, compared and then renamed; the same conversion gives the same bytes. To onnx goes one
    network, the policy unless `network` names
    another. `facts` and `env`, the environment, are what no file holds of an agent: they go into the
    sidecar. `like` names the user's own model, which is the target then, and `match` pairs layers or
    modules of the two (ops/like.py); with `accept_order`, order pairs what nothing else tells apart,
    and `cast` rounds numbers to the model's type.
    `from_` ("torch" or "tf") states whose orientation the arrays have where the file has no evidence. With
    `verify` an agent's networks are compared with what was read back, and nothing is written if one computes
    something else.
    """
    given_facts = merged_facts(facts, env)
    if targets.word(target, to) in targets.EXPORTS:
        # Playing and comparing networks takes modules that no other conversion needs.
        from ckpttool.ops.export import export

        _require_none("is not for onnx", weights=weights)
        _require_none("is not for onnx", part=part, strip=strip, restore=restore, map=rules, like=like)
        _require_none("is not for onnx", fold_weight_norm=fold_weight_norm, fold_normalizer=fold_normalizer)
        _require_none("is not for onnx", l2=l2, optimizer=optimizer)
        _require_none("is not for onnx", kind=kinds, flatten=flatten, match=match, accept_order=accept_order)
        _require_none("is not for onnx", unflatten=unflatten, no_verify=not verify)
        title = network or "actor"
        made = export(
            source,
            target,
            title,
            env,
            layout=layout,
            facts=given_facts,
            dry_run=dry_run,
            force=force,
            sync=sync,
        )
        return _exported(made, target)
    _require_none("is for --to onnx alone", network=network)
    if like is not None:
        from ckpttool.ops import like as models

        _require_none("is not for --like", weights=weights)
        _require_none("is not for --like", layout=layout, restore=restore)
        _require_none("is not for --like", **{name: [1] for name in given_facts.known})
        _require_none("is not for --like", l2=l2, optimizer=optimizer, fold_normalizer=fold_normalizer)
        wanted, said = Wanted(strip, False, fold_weight_norm), choices(kinds, flatten, unflatten)
        model = models.How(
            part,
            wanted,
            said,
            models.pairs(match),
            allow_missing=allow_missing,
            accept_order=accept_order,
            source=from_,
            cast=cast,
            rules=rule_file.load(rules) if rules is not None else None,
            dry_run=dry_run,
            force=force,
            sync=sync,
            prove=verify,
        )
        return _filled(models.like(source, target, to, like, model, progress), target)
    _require_none("is for --like alone", match=match, accept_order=accept_order, cast=cast)
    rule_set = rule_file.load(rules) if rules is not None else None
    no_optimizers, stated = statements(l2, optimizer)
    request = Request(
        targets.target_kind(target, to),
        layout,
        part,
        Wanted(strip, restore, fold_weight_norm),
        rule_set,
        stated,
        choices(kinds, flatten, unflatten),
        weights,
        fold_normalizer,
        from_,
        no_optimizers,
    )
    how = _How(allow_missing, dry_run, force, sync, verify, progress, target, to, given_facts)
    return _converted(source, targets.stem(target, request.kind), request, how)


class _How(NamedTuple):
    """How a target is written."""

    allow_missing: bool
    dry_run: bool
    force: bool
    sync: bool
    verify: bool
    progress: Progress
    target: str
    to: str | None
    facts: AgentFacts = NO_FACTS

    @property
    def words(self) -> str:
        """The target as it stands on the command line."""
        return f" {shlex.quote(self.target)}" + (f" --to {self.to}" if self.to is not None else "")


def _converted(source: str, target: str, request: Request, how: _How) -> Conversion:
    checkpoint = open_checkpoint(source)
    if request.plain and request.part is None and request.kind.format not in _ARRAYS:
        refused = side_files.refusal(checkpoint, rest=how.words)
        if refused is not None:
            raise refused
    if request.part is None:
        side_files.require_shards(checkpoint.tree)
    if not how.dry_run:
        save.require_free(target, request.kind, checkpoint.files, force=how.force)
        require_new(sidecar.beside(target), checkpoint.files, force=how.force)
    given = own_sidecar(checkpoint)
    own, said = _with_facts(given, checkpoint, request, how.facts)
    shards = other_shards(checkpoint)
    said = said if shards is None else (shards, *said)
    with Lane() as aside:
        # The receipt, written last, tells the source's digest: it is taken of what is read on the way.
        heard = Overheard(checkpoint, aside) if own.sha256 is None and not how.dry_run else None
        checkpoint = checkpoint if heard is None else heard.checkpoint
        try:
            way = route(checkpoint, request, own.sidecar)
        except CkpttoolError:
            side_files.require_shards(checkpoint.tree)
            raise
        side_files.require_shards(way.source)
        way = replace(way, report=replace(way.report, notes=(*said, *way.report.notes)))
        if how.dry_run or not (way.report.complete or how.allow_missing):
            entries = _ledger(checkpoint, way, given, request, how.facts)
            return Conversion(
                urls.spelled(checkpoint.path), target, way.report, None, written=False, ledger=entries
            )

        def digested() -> Own:
            return own if heard is None else replace(own, sha256=heard.digest().sha256)

        written, proof, back = _written(checkpoint, way, target, request, digested, how, own.sidecar)
    sha256 = None if written is None else written.sha256
    lost = () if back.note is None or sha256 is None else (back.note,)
    notes = (*way.report.notes, *proof.notes, *_compared(way, sha256), *lost)
    report = replace(way.report, notes=notes)
    return Conversion(
        urls.spelled(checkpoint.path),
        target,
        report,
        sha256,
        written=written is not None,
        parity=proof.networks,
        load=() if written is None else _loading(target, request, way, checkpoint),
        ledger=_ledger(checkpoint, way, given, request, how.facts),
    )


def _ledger(checkpoint: Checkpoint, way: Route, own: Own, request: Request, facts: AgentFacts) -> Entries:
    """Return the ledger of what is converted: that of the agent that every command prints, or of a model.

    `own` is the source's sidecar, `facts` are those that were given.
    """
    assumed = ledgers.assumed("architecture", way.report.assumed)
    if request.part is None:
        with contextlib.suppress(CkpttoolError):
            binding = playable_binding(checkpoint, request.layout)
            if binding is not None:
                agent = agent_of(checkpoint, binding, own, facts)
                return ledgers.merged(agent.ledger, assumed)
    if way.binding is not None:
        tree = networks(way.source, way.binding)
        known = knowledge.merged(own.sidecar, knowledge.of_files(way.binding, tree))
        return ledgers.merged(ledger_of(checkpoint, way.binding, own.sidecar, known, tree), assumed)
    written = {way.names[move.source] for move in way.moves if move.source in way.names}
    return ledgers.merged(evidence.left_by_model(checkpoint, written, way.kept), assumed)


def _with_facts(
    own: Own, checkpoint: Checkpoint, request: Request, facts: AgentFacts
) -> tuple[Own, tuple[str, ...]]:
    """Return what the source's sidecar holds with the facts that were given, and notes on these."""
    if not facts:
        return own, ()
    binding = None
    if request.part is None:
        with contextlib.suppress(UnsupportedError, UsageError):
            binding = playable_binding(checkpoint, request.layout)
    notes: tuple[str, ...] = (f"given: {facts.described()}",)
    if binding is not None:
        tree = networks(checkpoint.tree, binding)
        facts = facts.sized(*policy_sizes(binding, tree))
        known = knowledge.merged(own.sidecar, knowledge.of_files(binding, tree))
        notes = (*notes, *facts.contradictions(known))
    return replace(own, sidecar=facts.over(own.sidecar)), notes


def _loading(target: str, request: Request, way: Route, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the lines that load the target; its names are the source's unless a layout gave them."""
    source = cast(Format, plugins.find("formats", checkpoint.format).load()).FRAMEWORK
    foreign = way.binding is None and source == "tensorflow"
    return loading_lines(target, request.kind, way.tree, foreign=foreign)


def _compared(way: Route, sha256: str | None) -> tuple[str, ...]:
    """Return whether what was undone has the digest that its source had."""
    if way.before is None or sha256 is None:
        return ()
    if way.before == sha256:
        return ("the digest is that of the source again",)
    return ("the digest is another than the source had: its format kept something that this one does not",)


def _written(
    checkpoint: Checkpoint,
    way: Route,
    target: str,
    request: Request,
    digested: Callable[[], Own],
    how: _How,
    known: Sidecar | None,
) -> tuple[Digest | None, Proof, Undo]:
    """Write the target with all that lies beside it; no digest if a network of it computes something else."""
    back, proof = Undo(why=request.no_way_back), Proof()
    statistics = _statistics_beside(checkpoint, way, target, request, known, how)

    def beside(places: Mapping[Path, Path], lane: Lane) -> list[Output]:
        nonlocal back
        back = undo(way.source, way.moves, places) if way.whole else back
        if back.tree is None:
            back.kept = way.kept_tensors()
        kept = back.outputs(target, lane)
        for output in kept:
            require_new(output.file, checkpoint.files, force=how.force)
        return [*kept, *statistics]

    def told(written: Digest, found: Checkpoint) -> Sidecar:
        nonlocal proof
        own = digested()
        if way.binding is None:
            own = receipt.with_policy_facts(checkpoint, found, own, part=request.part)
            proof = Proof(notes=receipt.unplayable(own))
        made = receipt.receipt(checkpoint, way, own, written, back, request.part, request.options)
        if request.fold_normalizer:
            said = {**made.provenance, "obs_norm": "given: folded into the first layers"}
            made = replace(made, obs_norm=None, provenance=said)
        if not how.verify or way.binding is None:
            return made
        proof = prove(as_read(checkpoint, way.source, way.binding, own), found, target, made)
        return replace(made, parity=proof.entry())

    try:
        written = save.write(
            way.tree,
            target,
            request.kind,
            receipt=told,
            others=beside,
            sources=checkpoint.files,
            force=how.force,
            sync=how.sync,
            progress=how.progress,
        )
    except DiffersError as error:
        return None, error.proof, back
    return written, proof, back


def _statistics_beside(
    checkpoint: Checkpoint,
    way: Route,
    target: str,
    request: Request,
    known: Sidecar | None,
    how: _How,
) -> list[Output]:
    """Return the file of statistics that the target's library reads beside its own, if the agent has any."""
    layout = plugins.find("layouts", request.kind.layout).load()
    if way.binding is None or request.fold_normalizer or not hasattr(layout, "statistics_beside"):
        return []
    facts = knowledge.merged(known, knowledge.of_files(way.binding, networks(way.source, way.binding)))
    if facts.obs_norm is None:
        return []
    name, data = layout.statistics_beside(facts.obs_norm, facts.action_low, facts.action_high)
    file = os.path.join(os.path.dirname(target), name)
    require_new(file, checkpoint.files, force=how.force)

    def put(stream: IO[bytes]) -> None:
        stream.write(data)

    return [Output(file, put)]


def _require_none(why: str, **options: object) -> None:
    """Raise UsageError for an option that was given and that means nothing for such a target."""
    for name, value in options.items():
        if value:
            raise UsageError(f"--{name.replace('_', '-')} {why}", hint="leave it out")


def _filled(made: Filled, target: str) -> Conversion:
    """Return what became of the user's own model as the record of a conversion."""
    written = made.sha256 is not None
    return Conversion(
        made.path,
        target,
        made.report,
        made.sha256,
        written=written,
        model=made,
        load=made.load,
        ledger=made.ledger,
    )


def _exported(made: Exported, target: str) -> Conversion:
    """Return an export as the record of a conversion."""
    networks = () if made.parity is None else (made.parity,)
    return Conversion(
        made.source,
        target,
        made.report,
        made.sha256,
        written=made.sha256 is not None,
        parity=networks,
        ledger=made.ledger,
    )
