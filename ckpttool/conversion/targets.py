"""Targets of `--to`: the writing format, the layout of an agent in it, and the name."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from ckpttool.core import deferred, plugins, urls
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import CkpttoolError, UsageError, did_you_mean


class TargetKind(NamedTuple):
    """A target of `--to`: the format that writes it, and the layout of an agent in it.

    `options` are passed to the format's `pieces` besides the tree. `prefix` means that the target is
    not a file but the common prefix of several, `state` that its folder has a state file, as
    TensorFlow's do. `agent` means that only an agent can be written so: the layout is the point. An
    `ending` belongs to a name that stands for several files (`NAME.h5f`), before what they append.
    `plan` is the layout's function; a library with several file forms has several. `sharded` are
    options of the format's `plan_shards`: its files are written one by one (conversion/shards.py).
    `folder` means that the target is a folder, which must be new.
    """

    format: str
    layout: str
    options: Mapping[str, Any] = MappingProxyType({})
    prefix: bool = False
    state: bool = False
    agent: bool = False
    ending: str = ""
    plan: str = "plan"
    sharded: Mapping[str, Any] | None = None
    folder: bool = False


_BUNDLE = TargetKind("tensor_bundle", "td3_tf", MappingProxyType({"graph": True}), prefix=True, state=True)
# Libraries whose agents are files of torch.save.
_SAVED = ("cleanrl", "tianshou", "spinningup", "rsl_rl", "fasttd3", "skrl", "rl_games", "elegantrl")
TARGETS: dict[str, TargetKind] = {
    "torch": TargetKind("pytorch", "td3_torch"),
    "tf": _BUNDLE,
    "tf1": _BUNDLE._replace(options=MappingProxyType({"graph": False})),
    "fujimoto": TargetKind("pytorch_set", "fujimoto", prefix=True, agent=True),
    **{name: TargetKind("pytorch", name, agent=True) for name in _SAVED},
    "d3rlpy": TargetKind("d3rlpy", "d3rlpy", agent=True, plan="plan_d3"),
    "d3rlpy_model": TargetKind("pytorch", "d3rlpy", agent=True),
    "keras": TargetKind("keras_h5", "td3_tf", MappingProxyType({"root": "policy"})),
    "sb3": TargetKind("stable_baselines3", "stable_baselines3", agent=True),
    **{name: _BUNDLE._replace(layout=name, agent=True) for name in ("tf2rl", "tf_agents", "acme")},
    "keras_rl": TargetKind("keras_rl", "keras_rl", prefix=True, agent=True, ending=".h5f"),
    "rllib": TargetKind("rllib", "rllib", agent=True),
    "sb2": TargetKind("stable_baselines2", "stable_baselines2", agent=True),
    "safetensors": TargetKind("safetensors", "td3_torch"),
    "npz": TargetKind("npz", "td3_torch"),
    "dcp": TargetKind("pytorch_dcp", "td3_torch", sharded=MappingProxyType({}), folder=True),
}
# Exports for running, without a tree that could be read back (conversion/export.py).
ONNX = "onnx"
EXPORTS = (ONNX,)
# Suffixes of models that no target is.
_UNWRITTEN = (".keras", ".pb")
_SUFFIXES = {
    ".pt": "torch",
    ".pth": "torch",
    ".index": "tf",
    ".h5": "keras",
    ".safetensors": "safetensors",
    ".npz": "npz",
    ".cleanrl_model": "cleanrl",
    ".d3": "d3rlpy",
    ".onnx": "onnx",
}
# What other packages add targets by.
_PLUGIN_KINDS: tuple[plugins.Kind, ...] = ("formats", "layouts")
_INDEX, _INDEX_JSON = ".index", ".index.json"
# Other names of targets, accepted as they are.
_ALIASES = {
    "pytorch": "torch",
    "tensorflow": "tf",
    "tf2": "tf",
    "hf": "safetensors",
    "distcp": "dcp",
    "huggingface": "safetensors",
    "onnxruntime": "onnx",
}
# What users may mean by other words, in lower case without separators.
_MEANT = {
    **_ALIASES,
    "ckpt": "tf",
    "checkpoint": "tf",
    "tensorflow1": "tf1",
    "savedmodel": "tf",
    "pt": "torch",
    "pth": "torch",
    "h5": "keras",
    "hdf5": "keras",
    "weightsh5": "keras",
    "keras2": "keras",
    "keras3": "keras",
    "numpy": "npz",
    "np": "npz",
    "st": "safetensors",
    "stablebaselines": "sb2",
    "stablebaselines2": "sb2",
    "stablebaselines3": "sb3",
    "td3": "fujimoto",
}
_COMMON = "torch, tf, keras, safetensors, npz, onnx"


def list_targets() -> str:
    """Return the words of `--to`: the usual formats, then the libraries whose agents can be written."""
    libraries = [name for name, kind in TARGETS.items() if kind.agent]
    others = [name for name in target_words() if name not in TARGETS and name not in EXPORTS]
    return f"{_COMMON}, or a library: {', '.join(libraries + others)}"


def target_words() -> list[str]:
    """Return every word of `--to`, those of other packages last; a package that cannot be loaded has none."""
    rows = [row for kind in _PLUGIN_KINDS for row in plugins.installed(kind) if row.owner != "ckpttool"]
    words = [*TARGETS, *EXPORTS]
    for name in dict.fromkeys(row.name for row in rows):
        with contextlib.suppress(CkpttoolError):
            words += [name] * (name not in words and _plugin_target(name) is not None)
    return words


def find_target_name(kind: TargetKind) -> str:
    """Return the word of `--to` for a kind, "" for one that has no word, such as files in shards."""
    return next((name for name, target in TARGETS.items() if target is kind), "")


def _unknown_target_error(chosen: str, known: Collection[str]) -> UsageError:
    """Return the error for an unknown target, with the most similar one."""
    import difflib  # for errors only

    plain = re.sub(r"[^a-z0-9]", "", chosen.lower())
    names = {re.sub("_", "", name): name for name in known}
    close = difflib.get_close_matches(plain, [*names, *_MEANT], 1)
    meant = names.get(plain) or _MEANT.get(plain)
    if meant is None and close:
        meant = names.get(close[0]) or _MEANT.get(close[0])
    suggested = f"; {did_you_mean(repr(meant))}" if meant is not None else ""
    hint = f"--to {meant}" if meant is not None else f"state the format with --to: {list_targets()}"
    return UsageError(f"unknown target {chosen!r}{suggested}", hint=hint)


def infer_target_word(target: str, to: str | None) -> str:
    """Return the target's name: `to`, else the one implied by the target's suffix."""
    if target == "-":
        raise UsageError(
            "a checkpoint is not written to stdout", hint="name a file: its receipt lies beside it"
        )
    chosen = to or _SUFFIXES.get(os.path.splitext(target)[1])
    chosen = _ALIASES.get(chosen, chosen) if chosen is not None else None
    stem, suffix = os.path.splitext(target)
    if suffix == ".keras":
        named = f"{stem}.weights.h5" if chosen in (None, "keras") else _rename_target(target, chosen)
        reason = "a .keras file also contains the program's layers, which are not written"
        raise UsageError(reason, file=target, hint=f"name the target {named}")
    if chosen is None:
        hint = f"state the format with --to: {list_targets()}"
        raise UsageError("cannot infer the output format from the target's name", file=target, hint=hint)
    if chosen not in TARGETS and chosen not in EXPORTS and _plugin_target(chosen) is None:
        raise _unknown_target_error(chosen, target_words())
    _require_suffix(target, chosen)
    return chosen


def _require_suffix(target: str, chosen: str) -> None:
    """Raise UsageError for a target whose suffix is that of another format."""
    suffix = os.path.splitext(target)[1]
    if _contradicts(suffix, chosen):
        implied = _SUFFIXES.get(suffix)
        owner = f"that of --to {implied}" if implied else "another program's"
        choices = "leave out --to, or " if implied else ""
        raise UsageError(
            f"the suffix {suffix} is {owner}, not of --to {chosen}",
            file=target,
            hint=f"{choices}name the target {_rename_target(target, chosen)}",
        )


def _contradicts(suffix: str, chosen: str) -> bool:
    """Return whether a suffix is that of another format than the target's name."""
    if suffix and suffix not in _SUFFIXES:
        from ckpttool.listing import candidates  # few targets have such a suffix

        return suffix in _UNWRITTEN or candidates.suffix_kind(suffix) == candidates.FOREIGN
    implied = _SUFFIXES.get(suffix, chosen)
    kinds = (TARGETS.get(word) or _plugin_target(word) for word in {chosen, implied} - {ONNX})
    formats = {"" if kind is None else kind.format for kind in kinds}
    return len(formats | {ONNX} & {chosen, implied}) > 1


@contextlib.contextmanager
def complete_hints(target: str) -> Iterator[None]:
    """Complete the hint of an error that is raised in the block: see complete_hint."""
    try:
        yield
    except CkpttoolError as error:
        error.hint = error.hint and complete_hint(error.hint, target)
        raise


def complete_hint(hint: str, target: str) -> str:
    """Return the hint with a name of the target after each `--to X` that the target's suffix contradicts."""

    def complete(option: re.Match[str]) -> str:
        word = option[1]
        named = name_target(target, word) if word in (*TARGETS, *EXPORTS) else target
        return option[0] if named == target else f"{option[0]} and the target {named}"

    # A hint that names the target, or a whole command, is complete.
    return hint if re.search("target|ckpttool", hint) else re.sub(r"--to (\w+)", complete, hint)


def name_target(target: str, word: str) -> str:
    """Return the target's name, with the suffix of `--to WORD` if it has another format's."""
    chosen = _ALIASES.get(word, word)
    return _rename_target(target, chosen) if _contradicts(os.path.splitext(target)[1], chosen) else target


def _rename_target(target: str, chosen: str) -> str:
    """Return the target's name with the suffix of another format."""
    stem = os.path.splitext(target)[0]
    own = next(
        (suffix for suffix, word in _SUFFIXES.items() if word == chosen and word in (*TARGETS, ONNX)), ""
    )
    return urls.unused_name(stem if chosen in TARGETS and TARGETS[chosen].prefix else stem + own)


def suggest_targets(target: str | None, words: Sequence[str]) -> str:
    """Return the hint that writes one of the formats: an option, or a name if the target's is another's."""
    if target is None or os.path.splitext(target)[1] not in _SUFFIXES:
        return " or ".join(f"--to {word}" for word in words)
    names = {word: _rename_target(target, word) for word in words}
    return " or ".join(
        f"name the target {name}" + ("" if os.path.splitext(name)[1] in _SUFFIXES else f" with --to {word}")
        for word, name in names.items()
    )


def parse_target_kind(target: str, to: str | None) -> TargetKind:
    """Return the target's kind: that of `to`, else the one implied by the target's suffix."""
    chosen = infer_target_word(target, to)
    if chosen in EXPORTS:
        raise UsageError(f"{chosen} stores a runnable network, not a tree", hint="ckpttool.export writes one")
    return TARGETS.get(chosen) or cast(TargetKind, _plugin_target(chosen))


def _plugin_target(word: str) -> TargetKind | None:
    """Return the target of another package's format or layout that writes: its `TARGET`.

    By default a format is one file, and a layout's agents are in a file of its framework.
    """
    from ckpttool.libraries.recognize import can_write  # few words are not in the table

    for kind in _PLUGIN_KINDS:
        for row in plugins.installed(kind):
            if row.name != word or row.owner == "ckpttool":
                continue
            module = row.load()
            if kind == "formats" and module.WRITES:
                return getattr(module, "TARGET", TargetKind(word, "td3_torch"))
            if kind == "layouts" and can_write(module):
                own = TARGETS["torch" if module.TABLE.framework == "torch" else "tf"]
                return getattr(module, "TARGET", own._replace(layout=word, agent=True))
    return None


_SAFETENSORS = ".safetensors"
_SIZE = deferred.compile(r"(\d+(?:\.\d+)?)([KMGT]?)B?", re.ASCII | re.IGNORECASE)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_size(size: str) -> int:
    """Return the bytes of a size such as `5GB` or `500MB`, in powers of 1000 as huggingface_hub reads it."""
    match = _SIZE.fullmatch(size.strip())
    nbytes = 0 if match is None else int(float(match[1]) * _UNITS[match[2].upper()])
    if nbytes < 1:
        raise UsageError(f"invalid size {size!r}", hint="use a number of bytes, or a size such as 500MB, 5GB")
    return nbytes


def sharded_kind(
    target: str, kind: TargetKind, size: str | None, count: int | None, spread: bool
) -> TargetKind:
    """Return the kind of a target in shards, if any are stated; raise UsageError for a format without them.

    Args:
        target: the file, prefix or folder to write.
        kind: its format without shards.
        size: the largest size of a shard's tensors, e.g. "2GB".
        count: the number of shards, for formats that count them.
        spread: several processes write, so that there must be shards.
    """
    if size is None and count is None and not spread:
        return kind
    if kind.format == "safetensors" and size is not None and count is None:
        if not target.endswith((_SAFETENSORS, _SAFETENSORS + _INDEX_JSON)):
            name = os.path.join(target, f"model{_SAFETENSORS}")
            raise UsageError("shards have names that end with .safetensors", file=target, hint=f"use {name}")
        sharded = {"shard_bytes": parse_size(size)}
        return kind._replace(format="sharded", sharded=sharded, ending=_SAFETENSORS + _INDEX_JSON)
    if kind.format == "tensor_bundle" and (size is None or count is None):
        return kind._replace(
            sharded={"shard_bytes": None if size is None else parse_size(size), "shards": count}
        )
    if kind.format == "pytorch_dcp" and count is None:
        return kind if size is None else kind._replace(sharded={"shard_bytes": parse_size(size)})
    if spread and size is None and count is None:
        raise UsageError(
            "several processes write a target in several files",
            hint="use --shard-size 5GB with --to safetensors, or --to tf or dcp",
        )
    option = "--shards" if count is not None else "--shard-size"
    raise UsageError(
        f"{option} does not apply to this target",
        hint="use --shard-size with --to safetensors or dcp, or --shard-size or --shards with --to tf",
    )


def target_stem(target: str, kind: TargetKind) -> str:
    """Return the common prefix of the target's files; a prefix may be given by its index file."""
    if kind.state:
        return target.removesuffix(_INDEX)
    if kind.folder:
        return target.rstrip("/") if urls.is_url(target) else os.path.normpath(target)
    if kind.format == "sharded":
        target = target.removesuffix(_INDEX_JSON).removesuffix(_SAFETENSORS)
    return target.removesuffix(kind.ending) + kind.ending


def writer_options(target: str, kind: TargetKind) -> dict[str, Any]:
    """Return the format's options; TensorFlow counts saves, and a prefix ends with that count."""
    fields = dict(kind.options)
    if fields.get("graph"):
        number = re.search(r"-(\d{1,18})$", target, re.ASCII)
        fields["counter"] = int(number[1]) if number else 1
    return fields
