"""What a user wants of a conversion, and what that person says of the source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ckpttool.mapping.layers import Choice
from ckpttool.mapping.rule_file import RuleFile
from ckpttool.ops import layer_options
from ckpttool.ops.optimizer_options import NOTHING_STATED, Stated
from ckpttool.ops.plain_names import AS_IT_IS, Wanted
from ckpttool.ops.targets import TargetKind


class Request(NamedTuple):
    """The kind of target; a layout to take, the `part` below a path, what is done first (`wanted`).

    `rules` are the user's own, `stated` and `given` what was said of optimizers and layers. `weights` is
    "ema" or "raw" where one of a network and its average is wanted. With `fold_normalizer` statistics of
    observations become part of the first layers. `source` states whose orientation the source's arrays have
    ("torch" or "tf"). With `no_optimizers` the state of optimizers is left out.
    """

    kind: TargetKind
    layout: str | None = None
    part: str | None = None
    wanted: Wanted = AS_IT_IS
    rules: RuleFile | None = None
    stated: Stated = NOTHING_STATED
    given: Sequence[Choice] = ()
    weights: str | None = None
    fold_normalizer: bool = False
    source: str | None = None
    no_optimizers: bool = False

    @property
    def whole(self) -> bool:
        """Say whether all of the checkpoint is wanted, under the names that it has."""
        changed = self.weights is not None or self.wanted != AS_IT_IS or self.fold_normalizer
        changed = changed or self.no_optimizers
        return self.part is None and not changed

    @property
    def no_way_back(self) -> str | None:
        """Say why nothing could bring the checkpoint back, None if something could."""
        if self.part is not None:
            return "this is a part of the checkpoint"
        if self.weights is not None:
            return "--weights was used"
        if self.fold_normalizer:
            return "--fold-normalizer was used"
        if self.no_optimizers:
            return "--optimizer none was used"
        if self.wanted != AS_IT_IS:
            return "names or weights were changed first (--strip, --restore, --fold-weight-norm)"
        return None

    @property
    def plain(self) -> bool:
        """Say whether nothing is said of how to map it."""
        return not (self.layout or self.rules or any(self.stated) or self.given)

    @property
    def options(self) -> dict[str, str | bool | list[str]]:
        """The options that decide what the target holds, for the receipt; `part` and the statements apart."""
        kinds, flatten, unflatten = layer_options.texts(self.given)
        found = {
            "layout": self.layout,
            "weights": self.weights,
            "kind": kinds,
            "flatten": flatten,
            "unflatten": unflatten,
            "from": self.source,
            "strip": self.wanted.strip,
            "restore": self.wanted.restore,
            "fold_weight_norm": self.wanted.fold,
            "fold_normalizer": self.fold_normalizer,
            "no_optimizers": self.no_optimizers,
        }
        return {name: value for name, value in found.items() if value}

    @property
    def by_name(self) -> bool:
        """Say whether the target knows its variables by name alone, as TensorFlow 1 does."""
        return self.kind.options.get("graph") is False
