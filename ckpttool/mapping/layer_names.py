"""Names of layers as two frameworks may share them: bookkeeping left out, numbers that only count apart.

Keras counts its layers by class through a whole program (`dense_7`), lists and Sequentials count their items:
such numbers say an order and are never compared (keras/src/backend/common/name_scope.py, auto_name).
"""

from __future__ import annotations

import re
from typing import NamedTuple

# tf.train.Checkpoint's edges between a Keras model and its layers, and groups of Keras's files.
_BOOKKEEPING = frozenset(
    ("_functional", "_operations", "_layers", "layers", "_self_tracked_trackables", "model_weights", "vars")
)
_COUNTED = re.compile(r"(?:layer_with_weights-|layer-)?(\d{1,9})")
# What Keras calls layers that nobody named: their class in snake case.
_CLASSES = (
    "dense|einsum_dense|embedding|input_layer|bidirectional|time_distributed|prelu|p_re_lu|lstm|gru|simple_rnn|rnn"
    "|cu_dnnlstm|cu_dnngru|multi_head_attention|batch_normalization|layer_normalization|group_normalization"
    "|rms_normalization|(?:depthwise_|separable_)?conv[123]d(?:_transpose)?|sequential|functional|model"
)
_AUTO = re.compile(rf"({_CLASSES})(?:_(\d{{1,9}}))?")
# The two layers of a Bidirectional (keras/src/layers/rnn/bidirectional.py), and a torch module's parts.
_DIRECTION = re.compile(r"(forward|backward)_(?:layer|lstm|gru|simple_rnn|rnn)(?:_\d+)?")
_PART = re.compile(r"l(\d{1,9})(_reverse)?")
_DIGITS = re.compile(r"\d{1,9}")
# An item of a list in the TensorFlow models of Hugging Face: `layer_._0` is PyTorch's `layer.0`.
_ITEM = re.compile(r"(\w+)_\._(\d{1,9})")


class Word(NamedTuple):
    """One step of a layer's name: the text to compare, None if it only counts, and what it counts."""

    text: str | None
    number: int = 0


def words(name: tuple[str, ...]) -> tuple[tuple[str, Word], ...]:
    """Return the steps of a name with what each says; bookkeeping says nothing and is left out."""
    found: list[tuple[str, Word]] = []
    for step in name:
        item = _ITEM.fullmatch(step)
        if item is not None and not (found and found[-1][1] == word(item[1])):
            found.append((item[1], word(item[1])))
        if step and step not in _BOOKKEEPING:
            step = step if item is None else item[2]
            found.append((step, word(step)))
    return tuple(found)


def word(step: str) -> Word:
    """Return what one step of a name says."""
    if (counted := _COUNTED.fullmatch(step)) is not None:
        return Word(None, int(counted[1]))
    if (auto := _AUTO.fullmatch(step)) is not None:
        return Word(None, int(auto[2] or 0))
    if (direction := _DIRECTION.fullmatch(step)) is not None:
        return Word(direction[1])
    return Word(step.replace("_", "").replace("-", "").lower() or step)


def counted_by_framework(step: str) -> bool:
    """Say whether the number in a step is the framework's count, not a list's index or the program's word."""
    return word(step).text is None and not step.isdecimal()


def numbers(name: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of every step of a name; of two directions the first is forward.

    Step by step, because the first of Keras's names has none: `sequential` comes before `sequential_1`.
    """
    return tuple(tuple(map(int, _DIGITS.findall(_counted(step)))) for step in name)


def stem(name: tuple[str, ...]) -> tuple[str, ...]:
    """Return the name without its numbers: what several layers share that are counted."""
    return tuple(_DIGITS.sub("", _counted(step)).rstrip("_-") for step in name)


def _counted(step: str) -> str:
    direction = _DIRECTION.fullmatch(step)
    return step if direction is None else str(int(direction[1] == "backward"))


def steps_of_part(part: str, *, both: bool) -> tuple[str, ...]:
    """Return a torch module's recurrent layer as Keras would name it: its number, then its direction."""
    found = _PART.fullmatch(part)
    if found is None:
        return (part,) if part else ()
    return (found[1], "backward_layer" if found[2] else "forward_layer") if both else (found[1],)


# Words that name what a layer is for; those of one line mean the same. Two lines of one family exclude each
# other: a value stream is no advantage stream.
_FAMILIES = (
    (("q", "query"), ("k", "key"), ("value", "v", "val")),
    (("value", "v", "val"), ("advantage", "adv")),
    (
        ("mean", "mu", "means", "loc"),
        ("std", "sigma", "logstd", "log_std", "log_sigma", "logsigma", "logvar", "var", "scale", "log_scale"),
    ),
    (("actor", "policy", "pi"), ("critic", "qf", "qfunc", "value", "vf", "q", "v", "baseline")),
    (("online",), ("target", "targ", "tgt")),
    (("encoder", "enc"), ("decoder", "dec")),
    (("forward", "fwd"), ("backward", "bwd", "reverse")),
    (("student",), ("teacher",)),
    (("generator", "gen"), ("discriminator", "disc")),
    (("user",), ("item",)),
    (("left",), ("right",)),
)
# One spelling for words that mean the same: that of the first family that has the word.
_SPELLINGS: dict[str, str] = {}
for _same in (("o", "output", "out", "final"), *(same for family in _FAMILIES for same in family)):
    for _word in _same:
        _SPELLINGS.setdefault(_word, _same[0])
# Words for any layer or module, which tell nothing from another one.
_GENERIC = frozenset(
    (
        "layer",
        "layers",
        "dense",
        "linear",
        "fc",
        "conv",
        "net",
        "network",
        "model",
        "module",
        "block",
        "blocks",
    )
) | frozenset(
    (
        "mlp",
        "kernel",
        "weight",
        "bias",
        "w",
        "b",
        "lin",
        "proj",
        "projection",
        "embedding",
        "embeddings",
        "norm",
    )
)
_TOKEN = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def tokens(name: tuple[str, ...]) -> frozenset[str]:
    """Return the words in all steps of a name that may tell a layer from others, each in one spelling."""
    found: set[str] = set()
    for step, said in words(name):
        if said.text is None:
            continue
        whole = re.sub(r"[\d_.-]+$", "", step.lower())
        parts = [whole] if whole in _SPELLINGS else [each.lower() for each in _TOKEN.findall(step)]
        found |= {_SPELLINGS.get(part, part) for part in parts if part not in _GENERIC}
    return frozenset(found)


def contradict(one: frozenset[str], other: frozenset[str]) -> bool:
    """Say whether words of two names exclude each other: one has `value`, the other `advantage`."""
    for family in _FAMILIES:
        mine, theirs = (
            {n for n, same in enumerate(family) if any(_SPELLINGS[each] in said for each in same)}
            for said in (one, other)
        )
        if mine and theirs and not mine & theirs:
            return True
    return False
