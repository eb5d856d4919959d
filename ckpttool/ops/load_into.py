"""`load_into`: the values of a checkpoint, of whatever framework, put into a live model in place."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ckpttool import ledger as ledgers
from ckpttool.agents.skeleton.beside import Like
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import MappingError, UsageError, some
from ckpttool.formats.resolve import open_checkpoint
from ckpttool.layouts.recognise import recognised
from ckpttool.leaf import Leaf, Path
from ckpttool.ledger import Entries
from ckpttool.live.assigning import assign
from ckpttool.mapping.layers import Choice
from ckpttool.mapping.matches import Ambiguity, Filling, Match, Misfit
from ckpttool.mapping.report import Report
from ckpttool.mapping.skeleton import Skeleton
from ckpttool.ops import evidence, layer_options, model_source
from ckpttool.ops.live_model import LiveModel
from ckpttool.ops.model_source import ModelSource
from ckpttool.ops.plain_names import Prepared
from ckpttool.ops.target_model import TargetModel
from ckpttool.source import Shape
from ckpttool.tree import Tree

_SHOWN = 3
# The word for `layout` that leaves it to the layouts to recognise the agent.
AUTO = "auto"
Pairs = Mapping[str, str] | Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What became of a model: `filled` tensors of it have the checkpoint's values now, or would have.

    `matched` says layer by layer what filled what and how that was found ("given", "name", "words",
    "numbers", "only fit", "order"), `report` the rule of every tensor, what of the model is `missing`, what
    of the checkpoint is `unused`, and what was assumed. `different` belong together and do not fit; of what
    is `ambiguous` there is no evidence which is which. `cast` are tensors whose numbers have another width in
    the model. `loaded` is false for a dry run. The `ledger` lists what else in the checkpoint or beside it
    the model's outputs may depend on (ops/evidence.py); see `decides`.
    """

    model: str
    path: str
    filled: int
    report: Report
    matched: tuple[Match, ...]
    ambiguous: tuple[Ambiguity, ...]
    different: tuple[Misfit, ...]
    cast: tuple[str, ...]
    loaded: bool
    ledger: Entries = ()

    @property
    def complete(self) -> bool:
        """Say whether all of the model is filled."""
        return not self.report.missing

    @property
    def decides(self) -> bool:
        """Say whether something in the checkpoint certainly changes the outputs and is not in the model."""
        return ledgers.decides(self.ledger)

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "model": self.model,
            "path": self.path,
            "loaded": self.loaded,
            "complete": self.complete,
            "filled": self.filled,
            "matched": [each.document() for each in self.matched],
            "mapped": [each.document() for each in self.report.mapped],
            "missing": list(self.report.missing),
            "unused": list(self.report.unused),
            "different": [each.document() for each in self.different],
            "ambiguous": [each.document() for each in self.ambiguous],
            "cast": list(self.cast),
            "assumed": list(self.report.assumed),
            "ledger": ledgers.documents(self.ledger),
            "notes": list(self.report.notes),
        }


class Meeting(NamedTuple):
    """A model's skeleton and what fills it: `values` are the leaves that do, by their places in the model."""

    model: str
    given: Prepared
    skeleton: Tree
    filling: Filling
    values: Mapping[Path, Leaf]
    report: Report


def load_into(
    model: Any,
    path: str | os.PathLike[str] | Checkpoint,
    *,
    layout: str | None = None,
    part: str | None = None,
    strict: bool = True,
    match: Pairs = (),
    shapes: Sequence[Shape] = (),
    flatten: Pairs = (),
    unflatten: Pairs = (),
    kinds: Pairs = (),
    accept_order: bool = False,
    from_: str | None = None,
    dry_run: bool = False,
) -> Loaded:
    """Fill a live torch.nn.Module, tf.Module or Keras model in place; return what was matched, and how.

    `part` takes what lies below one path, or one network of an agent ("actor", "critic/q1"). `layout` reads
    the checkpoint as an agent of that layout ("auto": of whichever knows it), by canonical names. `match`
    pairs names of layers or modules, the checkpoint's and the model's; `accept_order` pairs by order what
    nothing else tells apart. `from_` ("torch" or "tf") states whose orientation the checkpoint's arrays have
    where it has no evidence. `shapes` are those of the model's
    inputs without the batch, for a model that has no weights before its first call or flattens images.
    `flatten`, `unflatten` and `kinds` describe layers of the checkpoint as the options of `convert` of these
    names do: `flatten={"dense": "7,7,64"}` is the shape of the image that a dense layer takes flattened,
    "no" states that it takes none, or in the order in which the model takes it.

    With `strict` nothing changes unless all of the model is filled and all weights of the checkpoint (or of
    the part) are used: raise MappingError if that is not so. Without,
    what fits is filled. A dry run changes nothing and returns the whole report; a model without weights is
    built all the same, by a call. Types and devices of the model stay. Raise what opening and reading raise:
    then nothing has changed either.

    >>> import ckpttool, torch
    >>> names = ["l1", "l2", "l3"]
    >>> sizes = [(3, 64), (64, 64), (64, 1)]
    >>> actor = torch.nn.ModuleDict({n: torch.nn.Linear(*size) for n, size in zip(names, sizes)})
    >>> done = ckpttool.load_into(actor, "sample_ckpts/td3_pendulum_tf/ckpt-15000", part="policy/actor")
    >>> done.filled, done.matched[0].source, done.matched[0].by, done.report.mapped[0].rule
    (6, 'l1', 'name', 'transpose')
    """
    target = LiveModel(model, shapes)
    checkpoint = opened(path)
    options = (each.items() if isinstance(each, Mapping) else each for each in (kinds, flatten, unflatten))
    met = meeting(
        target,
        checkpoint,
        layout=layout,
        part=part,
        match=match,
        accept_order=accept_order,
        from_=from_,
        choices=layer_options.choices(*([f"{name}={value}" for name, value in each] for each in options)),
    )
    met = met._replace(
        report=replace(met.report, assumed=tuple(map(_in_python, met.report.assumed))),
        filling=replace(met.filling, notes=tuple(map(_in_python, met.filling.notes))),
    )
    if strict and not dry_run:
        _require_complete(met, checkpoint, part)
    names = met.skeleton.names
    held = dict(met.skeleton.tensors())
    cast = tuple(names[place] for place, leaf in met.values.items() if held[place].dtype != leaf.dtype)
    if not dry_run:
        assign((names[place], target.tensors[place], leaf) for place, leaf in met.values.items())
    filling = met.filling
    return Loaded(
        target.title,
        checkpoint.path,
        len(met.values),
        met.report,
        filling.matched,
        filling.ambiguous,
        filling.misfits,
        cast,
        not dry_run,
        evidence.left_by_model(checkpoint, model_source.written(met.given, filling)),
    )


def opened(path: str | os.PathLike[str] | Checkpoint) -> Checkpoint:
    """Return the checkpoint, opened where only its path is told."""
    return path if isinstance(path, Checkpoint) else open_checkpoint(os.fspath(path))


def meeting(
    target: LiveModel | Like,
    checkpoint: Checkpoint,
    *,
    layout: str | None = None,
    part: str | None = None,
    match: Pairs = (),
    accept_order: bool = False,
    from_: str | None = None,
    choices: Sequence[Choice] = (),
) -> Meeting:
    """Return how a checkpoint fills a model, of this program or of a process beside it; nothing changes."""
    given = _given(checkpoint, layout, part, from_, target.shapes)
    pairs = tuple(match.items() if isinstance(match, Mapping) else match)
    if isinstance(target, LiveModel):
        owner = "torch" if target.framework == "torch" else "tensorflow"
        skeleton = target.skeleton(given.guessed(), foreign=given.framework != owner)
        return _met(target.title, given, skeleton, target.tensors, pairs, choices, accept_order=accept_order)
    with TargetModel(target) as beside:
        skeleton = beside.skeleton(given.guessed())
        return _met(target.factory, given, skeleton, (), pairs, choices, accept_order=accept_order)


def _met(
    title: str,
    given: ModelSource,
    skeleton: Skeleton,
    tensors: Iterable[Path],
    pairs: Sequence[tuple[str, str]],
    choices: Sequence[Choice],
    *,
    accept_order: bool,
) -> Meeting:
    filling = given.fill(skeleton, choices, given=pairs, strict=False, accept_order=accept_order)
    tree = skeleton.tree
    linked = set(skeleton.named()[1].values())
    # What no module holds by a name, nothing can fill.
    alone = tuple(path for path in tensors if path not in linked)
    filling = replace(filling, unfilled=(*filling.unfilled, *alone))
    left = set(filling.unfilled)
    values = {path: leaf for path, leaf in filling.tree.tensors() if path in linked and path not in left}
    report = model_source.report(given.ready, skeleton, filling)
    return Meeting(title, given.ready, tree, filling, values, report)


def _given(
    checkpoint: Checkpoint,
    layout: str | None,
    part: str | None,
    from_: str | None,
    shapes: Sequence[Shape],
) -> ModelSource:
    if layout is not None:
        return model_source.agent_source(checkpoint, part, None if layout == AUTO else layout)
    try:
        return model_source.model_source(checkpoint, part, source=from_, shapes=shapes)
    except UsageError:
        # A network of an agent has its canonical name whatever its codebase calls it.
        if part is None or recognised(checkpoint) is None:
            raise
        return model_source.agent_source(checkpoint, part, None)


def _require_complete(met: Meeting, checkpoint: Checkpoint, part: str | None) -> None:
    """Raise MappingError unless the model and the checkpoint's weights correspond in whole.

    The error names what does not fit, else what of the model is open, else what of the checkpoint is left.
    """
    if met.filling.misfits:
        error = met.filling.misfits[0].error.located(file=checkpoint.path)
        if met.filling.misfits[0].setting:
            raise error
        error.hint = (
            "the model needs the checkpoint's layers and sizes; match={SOURCE: TARGET} pairs other layers"
        )
        if (stated := _KIND.search(f"{error.expected} {error.found}")) is not None:
            error.hint = _stated(stated)
        raise error
    names = [met.skeleton.names[path] for path in met.filling.unfilled]
    if not names:
        _require_used(met, checkpoint, part)
        return
    raise MappingError(
        f"{len(names):,} of the tensors of {met.model} would not be filled, so none was",
        file=checkpoint.path,
        path=some(names, _SHOWN),
        hint=_hint(met.filling, checkpoint, part),
    )


def _require_used(met: Meeting, checkpoint: Checkpoint, part: str | None) -> None:
    unused = [met.given.names[path] for path in met.filling.unused]
    if not unused:
        return
    binding = None if part is not None else recognised(checkpoint)
    parts = f" (part= takes one of {some([p.title for p in binding.parts], _SHOWN)})" if binding else ""
    raise MappingError(
        f"{len(unused):,} weights of the checkpoint have no place in {met.model}, so nothing was filled",
        file=checkpoint.path,
        path=some(unused, _SHOWN),
        hint=f"strict=False leaves them out{parts}",
    )


_OPTION = re.compile(r"--(flatten|unflatten|kind) '([^'=]+)=([^']+)'")
# What a refusal proposes for a layer of an unknown class: the layer, and the kinds that its tensors could be.
_KIND = re.compile(r"--kind '([^']*)=([^'=]*)' converts it as one(?:, or ((?:\w| )+))?")
_ARGUMENT = re.compile(r"(?:flatten|kinds)=\{")


def _in_python(sentence: str) -> str:
    """Return a sentence that names options of the command line with the arguments of load_into."""
    return _OPTION.sub(
        lambda found: f"{found[1].replace('kind', 'kinds')}={{'{found[2]}': '{found[3]}'}}", sentence
    )


def _stated(kind: re.Match[str]) -> str:
    """Return the argument that states what a layer computes, for each kind that it could be."""
    layer, first, others = kind.groups()
    names = [first, *(others.split(" or ") if others else ())]
    return f"{' or '.join(f'kinds={{{layer!r}: {name!r}}}' for name in names)}, whichever it computes"


def _hint(filling: Filling, checkpoint: Checkpoint, part: str | None) -> str:
    binding = None if part is not None else recognised(checkpoint)
    if binding is not None and binding.parts:
        return f"part= takes one network: {some([each.title for each in binding.parts], _SHOWN)}"
    if filling.ambiguous:
        return filling.ambiguous[0].argument
    unfit = (
        note for note in filling.notes if note.startswith("nothing in the source") or _ARGUMENT.search(note)
    )
    return next(unfit, "dry_run=True returns the whole report, strict=False fills what it can")
