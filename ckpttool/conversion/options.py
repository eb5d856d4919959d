"""The options of conversions to a format, to ONNX and into a model, and which exclude each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, TypedDict

from ckpttool.conversion.preparation import NO_PREPARATION, PreparationOptions
from ckpttool.conversion.targets import TargetKind
from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.errors import UsageError
from ckpttool.evaluation.agent_facts import NO_FACTS, AgentFacts

if TYPE_CHECKING:
    from ckpttool.mapping.layer_kinds import LayerOption
    from ckpttool.mapping.user_rules import RuleFile
    from ckpttool.networks.worker import ModelSpec

STANDARD_OUTPUT = "-"
"""Value of `code` that returns the text without writing a file."""


@dataclass(frozen=True)
class TargetOptions:
    """Whether a file is written, and how.

    Output:
        dry_run (--dry-run): Show the mapping without writing anything.
        force (--force): Replace DST if it exists.
        sync (--no-sync): Do not flush to disk before the rename (faster).
    """

    dry_run: bool = False
    force: bool = False
    sync: bool = True


@dataclass(frozen=True)
class AgentReading:
    """How to read an agent, and facts about it that its files do not contain.

    Agent:
        layout: Layout to read; "none" maps the source by its layers alone.
        facts: Facts about the agent that its files do not contain, for the sidecar.
        env: Gymnasium environment of the agent, for the sidecar.
            An ONNX model has its action bounds if the files contain none.
        network (NAME): For onnx, --code: network, e.g. critic/q1. Default: actor.
    """

    layout: str | None = None
    facts: AgentFacts = NO_FACTS
    env: str | None = None
    network: str | None = None


@dataclass(frozen=True)
class MappingOptions(TargetOptions):
    """What is selected of a checkpoint, and how its tensors are mapped to those of a target.

    Target:
        to (WORD): Target, e.g. torch or tf. Default: from the suffix of DST.
            `ckpttool convert --help` lists the targets.

    Selection and names:
        part (PATH): Convert only what is under this path in SRC.
        strip (--strip): Strip wrapper prefixes (module., _orig_mod.) from names.
        fold_weight_norm (--fold-weight-norm): Fold weight_g and weight_v into a single weight.

    Mapping:
        rules (FILE, --map): TOML file of your own mapping rules.
            docs/mapping.md describes them.
        kinds (PATTERN=KIND, --kind): Kind of an ambiguous layer: 'attn=attention:8' (heads).
        flatten (PATTERN=H,W,C): Image that a layer receives flattened: 'actor/l1=7,7,64'.
            `PATTERN=no`: no image, or one with equal order in both models.
            `PATTERN=parts:2,1`: for --like: it takes the model's joined parts in this order.
        unflatten (PATTERN=H,W,C): Image that a dense output is reshaped to: 'fc=7,7,64'.
            `PATTERN=parts:2,1`: for --like: it makes the model's parts in this order.
        from_ (FRAMEWORK, --from): Orientation of SRC's matrices: torch or tf.
            It is used where no name or shape shows the orientation.
        optimizer (NAME/SETTING=VALUE): Hyperparameter that SRC lacks; 'none' leaves out optimizers.
        like_source: Code that builds SRC's model, to run it; it also shows the order of flattened images.

    Output:
        allow_missing (--allow-missing): Write even if entries are unmapped or missing.
        verify (--no-verify): Skip comparing network outputs after writing.
            With the comparison, nothing is written if an output differs.
    """

    to: str | None = None
    part: str | None = None
    strip: bool = False
    fold_weight_norm: bool = False
    rules: str | None = None
    kinds: Sequence[str] = ()
    flatten: Sequence[str] = ()
    unflatten: Sequence[str] = ()
    from_: str | None = None
    optimizer: Sequence[str] = ()
    like_source: ModelSpec | str | None = None
    allow_missing: bool = False
    verify: bool = True

    @property
    def preparation(self) -> PreparationOptions:
        """The changes to names and weights before the mapping."""
        return PreparationOptions(strip=self.strip, fold=self.fold_weight_norm)

    @property
    def layers(self) -> tuple[LayerOption, ...]:
        """The parsed `kinds`, `flatten` and `unflatten`; UsageError for invalid ones."""
        if not (self.kinds or self.flatten or self.unflatten):
            return ()
        from ckpttool.conversion.layer_options import parse_layer_options

        return parse_layer_options(self.kinds, self.flatten, self.unflatten)


@dataclass(frozen=True)
class FormatOptions(AgentReading, MappingOptions):
    """The options of `convert` to a format or a library.

    Target:
        shard_size (SIZE): For safetensors, tf, dcp: files of at most SIZE (5GB).
        shards (N): For tf: N files of about equal size.
        jobs (N, --jobs -j): Write several files in N processes.
        ray (ADDRESS): Write them on a Ray cluster; local starts --jobs workers.

    Selection and names:
        weights (ema|raw): Convert only averaged or only trained weights.
        restore (--restore): Restore the prefixes that SRC's sidecar lists.
        fold_normalizer (--fold-normalizer): Fold observation statistics into the first layers.
            This is for libraries that keep no statistics.

    Mapping:
        l2 (PATTERN=FACTOR): Keras l2 penalty of weights: 'critic/**/kernel=0.01'.
            It is the FACTOR of `l2(FACTOR)` in the program.

    Output:
        code (FILE.py): Also write the networks' code; '-' prints it.
            The file defines their modules, `load` and `act`. In Python, '-' writes no file; the result
            has the text as `code`.
    """

    weights: str | None = None
    restore: bool = False
    fold_normalizer: bool = False
    l2: Sequence[str] = ()
    shard_size: str | None = None
    shards: int | None = None
    jobs: int | None = None
    ray: str | None = None
    code: str | None = None

    @property
    def preparation(self) -> PreparationOptions:
        """The changes to names and weights before the mapping."""
        return PreparationOptions(self.strip, self.restore, self.fold_weight_norm)


@dataclass(frozen=True)
class ExportOptions(AgentReading, TargetOptions):
    """The options of `export`, to ONNX."""


@dataclass(frozen=True)
class ModelFileOptions(MappingOptions):
    """The options of `fill`, which writes the file that your own model loads.

    Your own model:
        like: Fill this model (`package.module:factory` or a ModelSpec) and write what it loads.
        match (SOURCE=TARGET): For --like: a pair of corresponding layers.
            SOURCE and TARGET are two layers or two modules.
        cast (--cast): For --like: round values to your model's dtypes.
        accept_order (--accept-order): For --like: pair ambiguous layers by their order.
            It is used where no other evidence decides.
        allow_unused (PATTERN): For --like: leave out unused tensors of SRC; repeatable.
        run_code (--run-code): For --like: run SRC although its file contains code.
            Code is in SavedModel, TorchScript and Lambda layers.
    """

    like: ModelSpec | str | None = None
    match: Sequence[str] = ()
    cast: bool = False
    accept_order: bool = False
    allow_unused: Sequence[str] = ()
    run_code: bool = False


@dataclass(frozen=True)
class ConversionOptions(ModelFileOptions, ExportOptions, FormatOptions):
    """The options of the command `convert`, which does the work of `convert`, `export` and `fill`.

    In parentheses are the placeholders of values, and the names of options of the command line other than the
    field's. Facts about an agent and models have more options there.
    """

    @property
    def job(self) -> type[TargetOptions]:
        """The record of what is done if the target is no ONNX model."""
        return FormatOptions if self.like is None else ModelFileOptions


class FurtherConversionKeywords(TypedDict, total=False):
    """Fields of FormatOptions that `convert` takes as keywords without listing them."""

    strip: bool
    restore: bool
    network: str | None
    fold_weight_norm: bool
    fold_normalizer: bool
    unflatten: Sequence[str]
    from_: str | None
    l2: Sequence[str]
    like_source: ModelSpec | str | None
    shard_size: str | None
    shards: int | None
    jobs: int | None
    ray: str | None
    sync: bool
    verify: bool


class FurtherFillKeywords(TypedDict, total=False):
    """Fields of ModelFileOptions that `fill` takes as keywords without listing them."""

    to: str | None
    strip: bool
    fold_weight_norm: bool
    unflatten: Sequence[str]
    from_: str | None
    optimizer: Sequence[str]
    sync: bool


def _states_parts(texts: Sequence[str]) -> bool:
    if not texts:
        return False
    from ckpttool.conversion.layer_options import PART_ORDER

    return any(PART_ORDER.fullmatch(text.rpartition("=")[2]) for text in texts)


def _names(record: type) -> set[str]:
    return {field.name for field in fields(record)}


# Keywords of `convert` that apply to a model of the user, and the function for these.
MOVED = dict.fromkeys(sorted(_names(ModelFileOptions) - _names(FormatOptions)), "fill")
_SPELLINGS = {"rules": "map", "kinds": "kind", "verify": "no-verify"}


def require_compatible(options: ConversionOptions, *, exported: bool) -> None:
    """Raise UsageError if two options exclude each other, or one does not apply to the kind of target.

    Those of another job do not apply. The word for ONNX, and the exit status that `allow_missing` permits,
    are the command's.
    """
    own = {*_names(ExportOptions), "to", "allow_missing"} if exported else _names(options.job)
    if not exported and options.code is None:
        own.discard("network")
    for option in fields(options):
        if option.name in own or getattr(options, option.name) == option.default:
            continue
        reason, hint = "cannot be used with --like", "leave it out"
        if exported:
            reason = "does not apply to onnx"
        elif option.name == "network":
            reason = "applies only to --to onnx and --code"
        elif option.name in MOVED:
            reason = "applies only to --like"
        if option.name == "allow_unused" and not exported:
            hint = "use --allow-missing to write the target without the unmapped tensors"
        names = (*options.facts.known,) if option.name == "facts" else (option.name,)
        spelling = _SPELLINGS.get(names[0], names[0].strip("_").replace("_", "-"))
        raise UsageError(f"--{spelling} {reason}", hint=hint)
    if options.like is None and (_states_parts(options.flatten) or _states_parts(options.unflatten)):
        name = "flatten" if _states_parts(options.flatten) else "unflatten"
        raise UsageError(f"--{name} PATTERN=parts:... applies only to --like", hint="leave it out")
    if options.strip and options.restore:
        raise UsageError("--strip and --restore undo each other")


class OptimizerOptions(NamedTuple):
    """Optimizer options: `l2` are weight patterns with a penalty factor, `optimizer` single settings."""

    l2: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = ()

    def settings(self) -> tuple[tuple[str, str], ...]:
        """Return the optimizers and settings of `--optimizer NAME/SETTING=VALUE`, without their values."""
        names = (text.partition("=")[0].strip().rpartition("/") for text in self.optimizer)
        return tuple((name, key) for name, _, key in names)


NO_OPTIMIZER_OPTIONS = OptimizerOptions()
_NO_OPTIMIZERS = "none"  # the value of --optimizer that leaves out every optimizer


def parse_optimizer_options(l2: Sequence[str], optimizer: Sequence[str]) -> tuple[bool, OptimizerOptions]:
    """Return whether optimizers are left out (`--optimizer none`), and the settings stated otherwise."""
    if _NO_OPTIMIZERS not in optimizer:
        return False, OptimizerOptions(tuple(l2), tuple(optimizer))
    if len(optimizer) > 1 or l2:
        raise UsageError("--optimizer none leaves out every optimizer", hint="leave out --l2 and --optimizer")
    return True, NO_OPTIMIZER_OPTIONS


class ConversionRequest(NamedTuple):
    """Target kind and options of a conversion, with option texts parsed.

    `rules` are the user's own, `stated` and `layer_options` the settings stated for optimizers and layers.
    With `no_optimizers` the state of optimizers is left out.
    """

    kind: TargetKind
    options: FormatOptions = FormatOptions()
    rules: RuleFile | None = None
    stated: OptimizerOptions = NO_OPTIMIZER_OPTIONS
    layer_options: Sequence[LayerOption] = ()
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
        return not (self.options.layout or self.rules or any(self.stated) or self.layer_options)

    def receipt(self) -> dict[str, str | bool | list[str]]:
        """Return the options that determine the target's contents; `part` and stated facts are separate."""
        kinds: list[str] = []
        flatten: list[str] = []
        unflatten: list[str] = []
        if self.layer_options:
            from ckpttool.conversion.layer_options import format_layer_options

            kinds, flatten, unflatten = format_layer_options(self.layer_options)
        contents = {
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
        return {name: value for name, value in contents.items() if value}

    @property
    def by_name(self) -> bool:
        """Return whether the target identifies variables by name only, as TensorFlow 1 does."""
        return self.kind.options.get("graph") is False


def parse_request(kind: TargetKind, options: FormatOptions) -> ConversionRequest:
    """Return the options with texts parsed; raise UsageError for invalid ones."""
    rules = None
    if options.rules is not None:
        from ckpttool.mapping.user_rules import load_rules

        rules = load_rules(options.rules)
    no_optimizers, stated = parse_optimizer_options(options.l2, options.optimizer)
    return ConversionRequest(kind, options, rules, stated, options.layers, no_optimizers)
