"""Keras optimizers: which of their variables are slots, of what kind, and of which variable.

Keras 3 numbers them in the order of their creation: iteration, learning rate, then one round after another
over the trained variables (keras/src/optimizers/base_optimizer.py, build and add_optimizer_variables, and
keras/src/optimizers/*.py). tf_keras 2.11 and later does the same without a learning rate
(tf_keras/src/optimizers/*.py). Kinds are named as object_graph.roles names them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckpttool.formats.hdf5 import Dataset
from ckpttool.formats.keras_tree.classes import numbered, snake
from ckpttool.formats.keras_tree.config import Config, config_of
from ckpttool.formats.object_graph.roles import slot_path
from ckpttool.leaf import Leaf, Path, Role, attr
from ckpttool.source import Shape

Round = tuple[str, ...]

_ROUNDS: dict[str, tuple[Round, ...]] = {
    **dict.fromkeys(("Adam", "AdamW", "Nadam", "Lamb", "ScheduleFreeAdamW"), (("m", "v"),)),
    "Adamax": (("m", "u"),),
    "RMSprop": (("rms",),),
    "Adagrad": (("accumulator",),),
    "Adadelta": (("accumulated_grad", "accumulated_delta"),),
    "Ftrl": (("accumulator", "linear"),),
    "Lion": (("m",),),
    "SGD": (("momentum",),),
}
_CLASSES = {snake(name): name for name in (*_ROUNDS, "Adafactor", "Muon", "LossScaleOptimizer")}
# Spellings of earlier defaults (tf_keras names an AdamW "AdamW", Keras 3.0 an RMSprop "rmsprop").
_CLASSES |= {"adamw": "AdamW", "rmsprop": "RMSprop", "r_m_sprop": "RMSprop"}
_SCALAR = "float"
INNER = "inner_optimizer"  # keras/src/optimizers/loss_scale_optimizer.py
_SCALED: tuple[tuple[str, Role], ...] = (
    *(("iterations", "counter"), ("learning_rate", "other")),
    *(("step_counter", "other"), ("dynamic_scale", "other")),
)
# The attribute that names weights in Keras's older files names here what an optimizer's variables are.
SLOTS = "weight_names"


class Trained(NamedTuple):
    """A variable that the optimizer trains."""

    path: Path
    shape: Shape


def class_of(name: str | None) -> str | None:
    """Return the optimizer's class by the name that Keras gave it, if it is one of Keras's."""
    return _CLASSES.get(snake(numbered(name)[0])) if name else None


def told(found: object) -> Config:
    """Return an optimizer's configuration; `model.compile("adam")` may leave only its name."""
    return Config(class_of(found), {}) if isinstance(found, str) else config_of(found)


def rounds(cls: str | None, settings: Mapping[str, Any]) -> tuple[Round, ...] | None:
    """Return the kinds of slots, round after round; None for a class whose order is not known."""
    own = _ROUNDS.get(cls or "")
    if own is None:
        return None
    if cls == "SGD" and settings.get("momentum") in (0, 0.0):
        own = ()
    if cls in ("Adam", "AdamW") and settings.get("amsgrad") is True:
        own = (*own, ("vhat",))
    if cls == "RMSprop":
        momentum = settings.get("momentum")
        own += (("momentum",),) if isinstance(momentum, int | float) and momentum > 0 else ()
        own += (("mg",),) if settings.get("centered") is True else ()
    first: tuple[Round, ...] = (("average",),) if settings.get("use_ema") is True else ()
    if settings.get("gradient_accumulation_steps"):
        first += (("gradient",),)
    return first + own


def leaves(
    datasets: Sequence[Dataset], at: Path, config: Config, trained: Sequence[Trained] | None
) -> tuple[dict[Path, Leaf], bool]:
    """Return an optimizer's leaves, and whether every slot has found its variable.

    `trained` are the trained variables in the optimizer's order, None when that order is not known. Counts
    and shapes must agree exactly, or no slot is said to belong to anything.
    """
    found: dict[Path, Leaf] = {}
    if config.cls == "LossScaleOptimizer" and len(datasets) >= len(_SCALED):
        return _scaled(datasets, at), True
    order = _order(datasets, config, trained)
    for number, kinds in ((n, _fit(datasets[n:], order, trained)) for n in starts(datasets)):
        if kinds is None:
            continue
        for name, role, dataset in _settings(datasets[:number]):
            found[*at, attr(name)] = _leaf(dataset, role)
        for dataset, kind, of in kinds:
            found[slot_path(at, kind, of)] = _leaf(dataset, "slot", of, kind)
        rest = datasets[number + len(kinds) :]
        for n, dataset in enumerate(rest):
            name = "u_product" if config.cls == "Nadam" and not n else f"vars/{number + len(kinds) + n}"
            found[(*at, *map(attr, name.split("/")))] = _leaf(dataset, "other")
        return found, True
    start = max(starts(datasets))
    for name, role, dataset in _settings(datasets[:start]):
        found[*at, attr(name)] = _leaf(dataset, role)
    for number, dataset in enumerate(datasets[start:], start):
        last = dataset.path.rpartition("/")[2] or str(number)
        found[*at, attr("vars"), attr(last)] = _leaf(dataset, "slot" if dataset.shape else "other")
    return found, start == len(datasets)


def _order(
    datasets: Sequence[Dataset], config: Config, trained: Sequence[Trained] | None
) -> tuple[Round, ...] | None:
    """Return the kinds of slots, round after round.

    A file of weights has no settings: of Adam's, which add rounds, those count whose shapes alone fit.
    """
    if config.settings or config.cls not in ("Adam", "AdamW"):
        return rounds(config.cls, config.settings)
    able = [rounds(config.cls, settings) for settings in _ADAMS]
    fits = [
        order
        for order in able
        if any(_fit(datasets[n:], order, trained) is not None for n in starts(datasets))
    ]
    return fits[0] if len(fits) == 1 else able[0]


_ADAMS: tuple[Mapping[str, Any], ...] = (
    {},
    {"amsgrad": True},
    {"use_ema": True},
    {"amsgrad": True, "use_ema": True},
)


def _scaled(datasets: Sequence[Dataset], at: Path) -> dict[Path, Leaf]:
    """Return what a LossScaleOptimizer stores: its own four, and again all of the one inside it.

    Source: keras/src/optimizers/loss_scale_optimizer.py, build and variables.
    """
    found: dict[Path, Leaf] = {}
    for (name, role), dataset in zip(_SCALED, datasets, strict=False):
        found[*at, attr(name)] = _leaf(dataset, role)
    for number, dataset in enumerate(datasets[len(_SCALED) :], len(_SCALED)):
        last = dataset.path.rpartition("/")[2] or str(number)
        found[*at, attr("vars"), attr(last)] = _leaf(dataset, "other")
    return found


def listed_leaves(
    datasets: Sequence[Dataset], at: Path, names: Sequence[str], owners: Mapping[str, tuple[Path, Shape]]
) -> dict[Path, Leaf] | None:
    """Return an optimizer's leaves if the file says what each is, as ckpttool's own files do.

    `names` has `KIND/DATASET` for every slot and an empty text for what is no slot; `owners` are the model's
    variables by dataset. Whatever disagrees makes the list worthless: then None.
    """
    found: dict[Path, Leaf] = {}
    settings = [d for d, name in zip(datasets, names, strict=False) if not name]
    if len(names) != len(datasets) or max(starts(settings)) != len(settings):
        return None
    for name, role, dataset in _settings(settings):
        found[*at, attr(name)] = _leaf(dataset, role)
    for dataset, name in zip(datasets, names, strict=True):
        kind, _, of = name.partition("/")
        if not name:
            continue
        path, shape = owners.get(of, (None, None))
        if path is None or shape != dataset.shape or not kind or slot_path(at, kind, path) in found:
            return None
        found[slot_path(at, kind, path)] = _leaf(dataset, "slot", path, kind)
    return found


def starts(datasets: Sequence[Dataset]) -> list[int]:
    """Return how many of the first variables may be settings: the iteration, then a learning rate or none."""
    if not datasets or datasets[0].shape or "int" not in datasets[0].dtype:
        return [0]
    if len(datasets) > 1 and not datasets[1].shape and _SCALAR in datasets[1].dtype:
        return [2, 1]
    return [1]


def _settings(datasets: Sequence[Dataset]) -> Iterator[tuple[str, Role, Dataset]]:
    named: tuple[tuple[str, Role], ...] = (("iterations", "counter"), ("learning_rate", "other"))
    for (name, role), dataset in zip(named, datasets, strict=False):
        yield name, role, dataset


def _fit(
    slots: Sequence[Dataset], order: tuple[Round, ...] | None, trained: Sequence[Trained] | None
) -> list[tuple[Dataset, str, Path]] | None:
    if order is None or trained is None:
        return None
    wanted = [(kind, one) for kinds in order for one in trained for kind in kinds]
    # Nadam ends with a scalar of its own.
    extra = slots[len(wanted) :]
    if len(slots) < len(wanted) or len(extra) > 1 or any(each.shape for each in extra):
        return None
    pairs = list(zip(slots, wanted, strict=False))
    if any(dataset.shape != one.shape for dataset, (_, one) in pairs):
        return None
    return [(dataset, kind, one.path) for dataset, (kind, one) in pairs]


def _leaf(dataset: Dataset, role: Role, of: Path | None = None, slot: str | None = None) -> Leaf:
    return Leaf(dataset.dtype, dataset.shape, dataset.source, dataset.path, role, of, slot)


# How a slot's name ends or begins: Keras 2 `Adam/dense/kernel/m`, 2.11 `Adam/m/dense/kernel`, 3
# `adam/dense_kernel_momentum` (save_optimizer_weights_to_hdf5_group of legacy_h5_format.py).
_KINDS = {
    "momentum": "m",
    "velocity": "v",
    "velocity_hat": "vhat",
    "norm": "u",
    "average_gradient": "mg",
    "accumulated_delta_var": "accumulated_delta",
    "gradient_accumulator": "gradient",
}
_COUNTERS = frozenset(("iter", "iteration", "iterations"))


def named_leaves(
    datasets: Sequence[tuple[str, Dataset]], at: Path, config: Config, owners: Mapping[str, Path]
) -> tuple[dict[Path, Leaf], bool]:
    """Return the leaves of an optimizer that names its variables, and whether every slot has found its own.

    `owners` are the model's variables by the name that each was saved with (a name that two have is absent).
    """
    found: dict[Path, Leaf] = {}
    flat = {name.replace("/", "_"): path for name, path in owners.items()}
    complete = True
    for name, dataset in datasets:
        short = name.removesuffix(":0")
        parts = short.removeprefix("training/").split("/")
        last = parts[-1]
        # Names begin with the optimizer's, in Keras 2.11 to 2.15 with the kind (`m/dense/kernel`).
        owner = _owner("/".join(parts[1:]), owners, flat) or _owner("/".join(parts), owners, flat)
        if last in _COUNTERS:
            path, leaf = (*at, attr("iterations")), _leaf(dataset, "counter")
        elif owner is not None:
            kind = _kind(owner[0], config.cls or class_of(parts[0]))
            path, leaf = slot_path(at, kind, owner[1]), _leaf(dataset, "slot", owner[1], kind)
        else:
            role: Role = "slot" if dataset.shape else "other"
            complete = complete and not dataset.shape
            path, leaf = (*at, *map(attr, parts[1:] or parts)), _leaf(dataset, role)
        found[path if path not in found else (*at, *map(attr, short.split("/")))] = leaf
    return found, complete


def _kind(word: str, cls: str | None) -> str:
    if cls == "RMSprop" and word in ("velocity", "momentum"):
        return "rms" if word == "velocity" else "momentum"
    return "momentum" if cls == "SGD" and word in ("m", "momentum") else _KINDS.get(word, word)


def _owner(rest: str, owners: Mapping[str, Path], flat: Mapping[str, Path]) -> tuple[str, Path] | None:
    kind, slash, name = rest.partition("/")
    if slash and name in owners:
        return kind, owners[name]
    name, slash, kind = rest.rpartition("/")
    if slash and name in owners:
        return kind, owners[name]
    for at, letter in enumerate(rest):
        if letter == "_" and rest[:at] in flat and len(rest) - at <= 32:
            return rest[at + 1 :], flat[rest[:at]]
    return None
