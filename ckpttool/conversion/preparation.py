"""Changes before the mapping: `convert` strips or restores wrapper prefixes and folds weight norm."""

from __future__ import annotations

from collections.abc import Mapping

from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import UsageError, abbreviate_list
from ckpttool.core.sidecar import Sidecar
from ckpttool.core.tree import Path, Tree, display
from ckpttool.mapping import wrappers


class PreparationOptions(NamedTuple):
    """Changes to names and weights before the mapping."""

    strip: bool = False
    restore: bool = False
    fold: bool = False


NO_PREPARATION = PreparationOptions()


class PreparedTree(NamedTuple):
    """A prepared tree.

    `names` are the leaves' names in the checkpoint, `rules` the changes made, `lost` the names of
    entries left out. `stripped` is the sidecar record that `--restore` needs; None if nothing was
    removed.
    """

    tree: Tree
    names: Mapping[Path, str]
    rules: Mapping[Path, str]
    lost: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    stripped: tuple[Mapping[str, object], ...] | None = None


def prepare_tree(
    whole: Tree, tree: Tree, part: str | None, options: PreparationOptions, known: Sidecar | None
) -> PreparedTree:
    """Return a tree prepared for mapping; raise UsageError when names cannot be restored.

    Args:
        whole: the checkpoint's tree.
        tree: what is converted of it.
        part: the path of that part; its names continue those above it.
        options: which names and weights are changed before the mapping.
        known: the sidecar, which records what an earlier conversion removed from names.
    """
    names: Mapping[Path, str] = tree.names
    if part is not None:
        from ckpttool.conversion.parts import full_names

        names = full_names(tree, part)
    done = PreparedTree(tree, names, {}, stripped=_recorded_wrappers(known) if part is None else None)
    if options.restore:
        done = _restore_wrappers(done, part, known)
    if options.strip:
        done = _strip_wrappers(done, lightning=part is not None and wrappers.is_lightning_state(whole, part))
    return _fold_weight_norm(done) if options.fold else done


def _recorded_wrappers(known: Sidecar | None) -> tuple[Mapping[str, object], ...] | None:
    # Prefixes removed once stay removed in a copy.
    return tuple(known.stripped) if known is not None and known.stripped else None


def _strip_wrappers(done: PreparedTree, *, lightning: bool) -> PreparedTree:
    stripped = wrappers.strip_prefixes(done.tree, lightning=lightning)
    if stripped is None:
        return done._replace(notes=(*done.notes, "no names have a wrapper prefix"))
    rules = {new: "strip" for new, old in stripped.moves.items() if new != old}
    removed = tuple(f"removed: {line}" for line in wrappers.describe_prefixes(stripped.decorations))
    averaged = any(
        wrapped.averaged is not None for decoration in stripped.decorations for wrapped in decoration.wrapped
    )
    own = ("n_averaged is AveragedModel's own counter; it is kept, but a plain module has no such entry",)
    return PreparedTree(
        stripped.tree,
        {new: done.names[old] for new, old in stripped.moves.items()},
        rules,
        done.lost,
        (*done.notes, *removed, *(own if averaged else ())),
        wrappers.prefix_documents(stripped.decorations),
    )


def _restore_wrappers(done: PreparedTree, part: str | None, known: Sidecar | None) -> PreparedTree:
    if part is not None:
        raise UsageError(
            "--restore needs the whole checkpoint, because its sidecar records the original names"
        )
    if known is None or not known.stripped:
        raise UsageError(
            "no sidecar beside the checkpoint records the prefixes removed from its names",
            hint="use a file that convert wrote with --strip: it has such a sidecar",
        )
    tree, moves = wrappers.restore_prefixes(done.tree, wrappers.parse_prefixes(known.stripped))
    rules = {new: "restore" for new, old in moves.items() if new != old}
    names = {new: done.names[old] for new, old in moves.items()}
    return PreparedTree(tree, names, rules, done.lost, done.notes)


def _fold_weight_norm(done: PreparedTree) -> PreparedTree:
    from ckpttool.mapping.weight_norm import merge_weight_norm  # only where it was requested

    merged = merge_weight_norm(done.tree)
    lost = tuple(done.names[path] for path in merged.lost)
    names = {path: done.names[path] for path in merged.tree if path in done.names}
    for weight, (length, direction) in merged.merged.items():
        names[weight] = f"{done.names[direction]} and {done.names[length]}"
    rules = {**done.rules, **dict.fromkeys(merged.merged, "fold weight norm")}
    lines = [] if merged.merged else ["no weight norm pairs found"]
    if lost:
        lines.append(
            "optimizers that trained folded weights, or may have, are left out because they number "
            "parameters; use --optimizer none to convert without them"
        )
    if merged.spectral:
        lines.append(
            f"spectral norm is not folded: {abbreviate_list([display(p) for p in merged.spectral], 3)}"
        )
    return PreparedTree(merged.tree, names, rules, (*done.lost, *lost), (*done.notes, *lines), done.stripped)
