"""The options of a conversion: the record, parsed option texts, and mutually exclusive options."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

from ckpttool.conversion.layer_options import format_layer_options, parse_layer_options
from ckpttool.conversion.optimizer_options import (
    NO_OPTIMIZER_OPTIONS,
    OptimizerOptions,
    parse_optimizer_options,
)
from ckpttool.conversion.preparation import NO_PREPARATION, PreparationOptions
from ckpttool.conversion.targets import TargetKind
from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.errors import UsageError
from ckpttool.evaluation.evidence import NO_FACTS, AgentFacts, add_environment
from ckpttool.mapping.layers import LayerOption

if TYPE_CHECKING:
    from ckpttool.mapping.user_rules import RuleFile
    from ckpttool.networks.worker import ModelSpec


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """The options of `convert`, named as on the command line (`rules` is `--map`, `from_` `--from`).

    Args:
        to: target to write (`torch`, `tf`, `onnx`, `sb3`, ...); default: from the target's suffix.
        layout: read the source as this layout; "none": by its layers alone.
        part: convert only what lies under this path.
        weights: "ema" for averaged weights alone, "raw" for the trained ones without them.
        strip: strip wrapper prefixes (`module.`, `_orig_mod.`) from names.
        restore: put back the prefixes that `strip` removed, as the source's sidecar lists them.
        fold_weight_norm: fold direction and length of weight norm into a single weight.
        fold_normalizer: fold observation statistics into the first layers, for libraries that keep
            none.
        rules: TOML file of mapping rules (docs/mapping.md).
        kinds: `PATTERN=KIND` for layers that could be of several kinds.
        flatten: `PATTERN=H,W,C`, the shape of the image that a layer receives flattened;
            `PATTERN=no`.
        unflatten: `PATTERN=H,W,C`, the shape of the image that a dense layer's output becomes.
        from_: orientation of the source's matrices ("torch" or "tf") where no name or shape shows it.
        l2: `PATTERN=FACTOR`, weights that a Keras program penalized with `l2(FACTOR)`.
        optimizer: `NAME/SETTING=VALUE`, hyperparameters missing from the checkpoint; "none" leaves
            out the state of optimizers.
        network: network to export to onnx; default: the actor.
        env: Gymnasium id of the agent's environment, for the sidecar.
        facts: facts about the agent that its files do not contain, for the sidecar.
        like: fill this model (`package.module:factory` or a ModelSpec) and write what it loads.
        match: `SOURCE=TARGET`, for `like`: two layers or modules that belong together.
        accept_order: for `like`: pair layers by order where no other evidence decides.
        cast: for `like`: round numbers to the types of the model.
        like_source: the code that builds the source's model; a call of it shows the order of flattened
            images, and for `like` it runs beside the filled model.
        run_code: for `like`: run a source whose file contains code (SavedModel, TorchScript, Lambda layers).
        allow_unused: for `like`: patterns of the source's tensors that may be left out.
        shard_size: write several files of at most this size ("5GB"), for safetensors and tf.
        shards: write this number of files, for tf.
        jobs: number of processes that write these files; None for this one.
        ray: address of the Ray cluster that writes these files, or "local" for one of `jobs` workers.
        allow_missing: write even if something is unmapped.
        dry_run: plan and report; write nothing.
        force: replace the target if it exists.
        sync: flush to disk before the rename.
        verify: compare the networks before and after; write nothing if an output differs.
        code: Python file to write beside the target: the networks' modules, `load` and `act`; "-" writes
            none. The result has the text as `code`.

    """

    to: str | None = None
    layout: str | None = None
    part: str | None = None
    weights: str | None = None
    strip: bool = False
    restore: bool = False
    fold_weight_norm: bool = False
    fold_normalizer: bool = False
    rules: str | None = None
    kinds: Sequence[str] = ()
    flatten: Sequence[str] = ()
    unflatten: Sequence[str] = ()
    from_: str | None = None
    l2: Sequence[str] = ()
    optimizer: Sequence[str] = ()
    network: str | None = None
    env: str | None = None
    facts: AgentFacts = NO_FACTS
    like: ModelSpec | str | None = None
    match: Sequence[str] = ()
    accept_order: bool = False
    cast: bool = False
    like_source: ModelSpec | str | None = None
    run_code: bool = False
    allow_unused: Sequence[str] = ()
    shard_size: str | None = None
    shards: int | None = None
    jobs: int | None = None
    ray: str | None = None
    allow_missing: bool = False
    dry_run: bool = False
    force: bool = False
    sync: bool = True
    verify: bool = True
    code: str | None = None

    @property
    def preparation(self) -> PreparationOptions:
        """The changes to names and weights before the mapping."""
        return PreparationOptions(self.strip, self.restore, self.fold_weight_norm)

    @property
    def layers(self) -> tuple[LayerOption, ...]:
        """The parsed `kinds`, `flatten` and `unflatten`; UsageError for invalid ones."""
        return parse_layer_options(self.kinds, self.flatten, self.unflatten)


class ConversionKeywords(TypedDict, total=False):
    """Fields of ConversionOptions as keywords, for type checkers and editors."""

    to: str | None
    layout: str | None
    part: str | None
    weights: str | None
    strip: bool
    restore: bool
    fold_weight_norm: bool
    fold_normalizer: bool
    rules: str | None
    kinds: Sequence[str]
    flatten: Sequence[str]
    unflatten: Sequence[str]
    from_: str | None
    l2: Sequence[str]
    optimizer: Sequence[str]
    network: str | None
    env: str | None
    facts: AgentFacts
    like: ModelSpec | str | None
    match: Sequence[str]
    accept_order: bool
    cast: bool
    like_source: ModelSpec | str | None
    run_code: bool
    allow_unused: Sequence[str]
    shard_size: str | None
    shards: int | None
    jobs: int | None
    ray: str | None
    allow_missing: bool
    dry_run: bool
    force: bool
    sync: bool
    verify: bool
    code: str | None


class Exclusion(NamedTuple):
    """Options (fields of ConversionOptions) rejected when a condition holds, and the error's text."""

    holds: Callable[[ConversionOptions, bool], bool]
    options: tuple[str, ...]
    why: str
    hint: str | None = "leave it out"


# Conditions depend on the options and on whether the target is an export; the first match is the error.
# `verify` is rejected if it is false.
EXCLUSIONS = (
    Exclusion(
        lambda _, exported: exported,
        (
            *("weights", "part", "strip", "restore", "rules", "like", "fold_weight_norm", "fold_normalizer"),
            *("l2", "optimizer", "kinds", "flatten", "match", "accept_order", "unflatten", "like_source"),
            *("verify", "code", "shard_size", "shards", "jobs", "ray"),
        ),
        "does not apply to onnx",
    ),
    Exclusion(lambda _, exported: not exported, ("network",), "applies only to --to onnx"),
    Exclusion(
        lambda options, _: options.like is not None,
        (
            *("weights", "layout", "restore", "facts", "l2", "fold_normalizer", "code"),
            *("shard_size", "shards", "jobs", "ray"),
        ),
        "cannot be used with --like",
    ),
    Exclusion(
        lambda options, exported: options.like is None and not exported,
        ("match", "accept_order", "cast", "run_code"),
        "applies only to --like",
    ),
    Exclusion(
        lambda options, exported: options.like is None and not exported,
        ("allow_unused",),
        "applies only to --like",
        "use --allow-missing to write the target without the unmapped tensors",
    ),
    Exclusion(lambda options, _: options.restore, ("strip",), "and --restore undo each other", None),
)
_SPELLINGS = {"rules": "map", "kinds": "kind", "verify": "no-verify"}


def require_compatible(options: ConversionOptions, *, exported: bool) -> None:
    """Raise UsageError if two options exclude each other, or one does not apply to the kind of target."""
    for rule in EXCLUSIONS:
        if rule.holds(options, exported):
            for name in rule.options:
                for given in _given_options(options, name):
                    raise UsageError(f"--{given} {rule.why}", hint=rule.hint)


def _given_options(options: ConversionOptions, name: str) -> Iterator[str]:
    """Yield the command-line options, without dashes, that set a field."""
    if name == "facts":
        known = add_environment(options.facts, options.env).known
        yield from (fact.replace("_", "-") for fact in known)
    elif getattr(options, name) if name != "verify" else not options.verify:
        yield _SPELLINGS.get(name, name.replace("_", "-"))


_Options = TypeVar("_Options")


def with_keywords(options: _Options, keywords: Mapping[str, Any], function: str) -> _Options:
    """Return the options record with the keywords as its fields.

    Raise TypeError for an unknown keyword, with the most similar field.
    """
    known = [each.name for each in fields(cast(Any, options)) if each.init]
    for name in keywords:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            meant = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{meant}")
    return cast(_Options, replace(cast(Any, options), **keywords)) if keywords else options


class ConversionRequest(NamedTuple):
    """Target kind and options of a conversion, with option texts parsed.

    `rules` are the user's own, `stated` and `given` the settings stated for optimizers and layers. With
    `no_optimizers` the state of optimizers is left out.
    """

    kind: TargetKind
    options: ConversionOptions = ConversionOptions()
    rules: RuleFile | None = None
    stated: OptimizerOptions = NO_OPTIMIZER_OPTIONS
    given: Sequence[LayerOption] = ()
    no_optimizers: bool = False

    @property
    def whole(self) -> bool:
        """Return whether the whole checkpoint is converted under its own names."""
        return self.options.part is None and self._change is None

    @property
    def no_way_back(self) -> str | None:
        """Return why the conversion cannot be reversed, None if it can."""
        return self._change if self.options.part is None else "--part was used"

    @property
    def _change(self) -> str | None:
        """The option that changes what is converted, as a reason."""
        if self.options.weights is not None:
            return "--weights was used"
        if self.options.fold_normalizer:
            return "--fold-normalizer was used"
        if self.no_optimizers:
            return "--optimizer none was used"
        if self.options.preparation != NO_PREPARATION:
            return "names or weights were changed before mapping (--strip, --restore, --fold-weight-norm)"
        return None

    @property
    def plain(self) -> bool:
        """Return whether no option controls the mapping."""
        return not (self.options.layout or self.rules or any(self.stated) or self.given)

    def receipt(self) -> dict[str, str | bool | list[str]]:
        """Return the options that determine the target's contents; `part` and stated facts are separate."""
        kinds, flatten, unflatten = format_layer_options(self.given)
        found = {
            "layout": self.options.layout,
            "weights": self.options.weights,
            "kind": kinds,
            "flatten": flatten,
            "unflatten": unflatten,
            "from": self.options.from_,
            "strip": self.options.strip,
            "restore": self.options.restore,
            "fold_weight_norm": self.options.fold_weight_norm,
            "fold_normalizer": self.options.fold_normalizer,
            "no_optimizers": self.no_optimizers,
        }
        return {name: value for name, value in found.items() if value}

    @property
    def by_name(self) -> bool:
        """Return whether the target identifies variables by name only, as TensorFlow 1 does."""
        return self.kind.options.get("graph") is False


def parse_request(kind: TargetKind, options: ConversionOptions) -> ConversionRequest:
    """Return the options with texts parsed; raise UsageError for invalid ones."""
    rules = None
    if options.rules is not None:
        from ckpttool.mapping.user_rules import load_rules

        rules = load_rules(options.rules)
    no_optimizers, stated = parse_optimizer_options(options.l2, options.optimizer)
    return ConversionRequest(kind, options, rules, stated, options.layers, no_optimizers)
