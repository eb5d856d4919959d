"""What `convert` may do to a tree before it is mapped: wrappers' names go or return, weight norm folds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ckpttool.errors import UsageError, some
from ckpttool.leaf import Path, display
from ckpttool.mapping import decorations, weight_norm
from ckpttool.mapping.decorations import Decoration
from ckpttool.ops.part import full_names
from ckpttool.sidecar import Sidecar
from ckpttool.tree import Tree

# Names under which training programs keep a network's state_dict beside other things, and averages of it.
_NETWORKS = frozenset(
    ("state_dict", "model", "model_state_dict", "net", "network", "module", "weights", "policy")
) | {"policy_state_dict", "model_state", "params"}
_AVERAGES = frozenset(
    ("ema", "model_ema", "ema_model", "ema_state_dict", "state_dict_ema", "ema_params", "swa", "swa_model")
) | {"average_model", "averaged_model"}
_PLACES = 3


class Wanted(NamedTuple):
    """What is to be done to names and weights before the mapping."""

    strip: bool = False
    restore: bool = False
    fold: bool = False


AS_IT_IS = Wanted()


class Prepared(NamedTuple):
    """A tree that was prepared.

    `names` are every leaf's in the checkpoint, `rules` what was done to it, `lost` the names of what is left
    out. `stripped` is what `--restore` needs, for the sidecar; None if nothing was removed.
    """

    tree: Tree
    names: Mapping[Path, str]
    rules: Mapping[Path, str]
    lost: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    stripped: tuple[Mapping[str, object], ...] | None = None


def prepared(whole: Tree, tree: Tree, part: str | None, wanted: Wanted, known: Sidecar | None) -> Prepared:
    """Return the tree, the part of the whole one, as it is to be mapped.

    Raise UsageError when names cannot be restored.
    """
    if wanted.strip and wanted.restore:
        raise UsageError("--strip and --restore undo each other")
    names = full_names(tree, part)
    done = Prepared(tree, names, {}, stripped=_kept(known) if part is None else None)
    if wanted.restore:
        done = _restored(done, part, known)
    if wanted.strip:
        done = _stripped(done, lightning=part is not None and decorations.lightnings(whole, part))
    return _folded(done) if wanted.fold else done


def notes(tree: Tree, *, agent: bool = False) -> tuple[str, ...]:
    """Return what `inspect` says: which wrappers names carry, where a network and its average stand.

    Of an agent the layout says where its networks are.
    """
    return (*_carried(decorations.decorated(tree)), *_entries(tree, agent=agent))


def _kept(known: Sidecar | None) -> tuple[Mapping[str, object], ...] | None:
    # What was removed once is still removed in a copy.
    return tuple(known.stripped) if known is not None and known.stripped else None


def _stripped(done: Prepared, *, lightning: bool) -> Prepared:
    found = decorations.stripped(done.tree, lightning=lightning)
    if found is None:
        return done._replace(notes=(*done.notes, "no names carry a wrapper"))
    rules = {new: "strip" for new, old in found.moves.items() if new != old}
    told = tuple(f"removed: {line}" for line in _places(found.decorations))
    averaged = any(wrapped.averaged is not None for each in found.decorations for wrapped in each.wrapped)
    own = ("n_averaged is AveragedModel's own count; it stays, and a plain module does not know it",)
    return Prepared(
        found.tree,
        {new: done.names[old] for new, old in found.moves.items()},
        rules,
        done.lost,
        (*done.notes, *told, *(own if averaged else ())),
        decorations.documents(found.decorations),
    )


def _restored(done: Prepared, part: str | None, known: Sidecar | None) -> Prepared:
    if part is not None:
        raise UsageError("--restore needs the whole checkpoint, whose sidecar says what its names were")
    if known is None or not known.stripped:
        raise UsageError(
            "no sidecar beside the checkpoint says what was removed from its names",
            hint="convert --strip leaves one beside what it writes",
        )
    tree, moves = decorations.restored(done.tree, decorations.remembered(known.stripped))
    rules = {new: "restore" for new, old in moves.items() if new != old}
    names = {new: done.names[old] for new, old in moves.items()}
    return Prepared(tree, names, rules, done.lost, done.notes)


def _folded(done: Prepared) -> Prepared:
    found = weight_norm.folded(done.tree)
    lost = tuple(done.names[path] for path in found.lost)
    names = {path: done.names[path] for path in found.tree if path in done.names}
    for weight, (length, direction) in found.made.items():
        names[weight] = f"{done.names[direction]} and {done.names[length]}"
    rules = {**done.rules, **dict.fromkeys(found.made, "fold weight norm")}
    said = [] if found.made else ["no pair of tensors is a weight under weight norm"]
    if lost:
        said.append(
            "an optimizer that trained folded weights, or may have, is left out: it numbers parameters; "
            "--optimizer none converts without it"
        )
    if found.spectral:
        said.append(f"spectral norm is not folded: {some([display(p) for p in found.spectral], _PLACES)}")
    return Prepared(found.tree, names, rules, (*done.lost, *lost), (*done.notes, *said), done.stripped)


def _carried(found: tuple[Decoration, ...]) -> Iterator[str]:
    for line in _places(found):
        yield f"{line}: convert --strip removes that"


def _places(found: tuple[Decoration, ...]) -> Iterator[str]:
    """Go through what is carried, each with the places where it is: `names below model carry module.`."""
    by_segments: dict[tuple[str, ...], list[str]] = {}
    for each in found:
        for wrapped in each.wrapped:
            place = "/".join((*([display(each.where)] if each.where else []), *wrapped.at))
            by_segments.setdefault(wrapped.segments, []).append(place)
    for segments, places in by_segments.items():
        below = f" below {some(places, _PLACES)}" if any(places) else ""
        whose = ", then ".join(dict.fromkeys(decorations.whose(segment) for segment in segments))
        yield f"names{below} carry {'.'.join(segments)}. ({whose})"


def _entries(tree: Tree, *, agent: bool) -> Iterator[str]:
    tops = {path[0].value: None for path, _ in tree.tensors() if len(path) > 1 and path[0].kind == "key"}
    others = {path[0] for path in tree} if tops else set()
    if len(others) < 2:
        return
    for name in tops:
        if name in _NETWORKS and not agent:
            yield f"a network stands below {name}, among other things: --part {name} converts it alone"
        elif name in _AVERAGES:
            yield f"an average of the weights stands below {name}: --part {name} converts it alone"
