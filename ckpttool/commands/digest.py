"""`digest`: the sha256 of each tensor and of the whole checkpoint, with all format checksums verified."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace

from ckpttool.core import text
from ckpttool.core.atomic_write import Progress, ignore_progress
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.digests import Digest, combine_digests, digest_checkpoint, hash_tensor
from ckpttool.core.errors import FormatError, NotFoundError
from ckpttool.core.text import compile_glob, no_match_error
from ckpttool.core.urls import format_command, unused_name
from ckpttool.formats.detect import open_checkpoint


class DigestComparison(NamedTuple):
    """Comparison with a saved digest: whether all is equal, differing keys, and keys of one side only."""

    equal: bool
    different: tuple[str, ...]
    only_here: tuple[str, ...] = ()
    only_saved: tuple[str, ...] = ()


def filter_digest(digest: Digest, glob: str | None) -> Digest:
    """Return the digest with only the tensors whose path matches; `sha256` still covers the whole checkpoint.

    Raise UsageError for a `glob` without a match.
    """
    keep = compile_glob(glob)
    kept = tuple(tensor for tensor in digest.tensors if keep(tensor.path))
    if glob is not None and not kept:
        raise no_match_error(glob, [tensor.path for tensor in digest.tensors], digest.path)
    return replace(digest, tensors=kept)


def digest(
    path: str,
    progress: Progress = ignore_progress,
    *,
    jobs: int | None = None,
    ray: str | None = None,
) -> Digest:
    """Return all digests of the checkpoint at a path, reading every tensor once.

    `jobs` is the number of processes that read them, by default this one; `ray` the address of a Ray
    cluster that does. Raise ChecksumError if a checksum stored in the format does not match.

    >>> import ckpttool
    >>> len(ckpttool.digest("sample_ckpts/td3_pendulum_torch/ckpt-15000.pt").sha256)
    64
    """
    checkpoint = open_checkpoint(path)
    if ray is None and jobs in (None, 1):  # most runs do not need the module of processes
        return digest_checkpoint(checkpoint, progress)
    from ckpttool.listing import processes

    names = checkpoint.tree.names
    tensors = dict(checkpoint.tree.tensors())
    entries = [(leaf, names[at], leaf.nbytes) for at, leaf in tensors.items()]
    hashes = processes.map_entries(hash_tensor, entries, (checkpoint,), progress, jobs=jobs, ray=ray)
    return combine_digests(checkpoint, dict(zip(tensors, hashes, strict=True)))


def compare_with_saved(digest: Digest, saved_file: str) -> DigestComparison:
    """Compare with a digest saved by `digest --json`, or with the target digest in a sidecar."""
    if not os.path.isfile(saved_file):
        saving = format_command("digest", digest.path, "--json")
        hint = f"write it by {saving} > {shlex.quote(saved_file)}"
        raise NotFoundError("saved digest not found", file=saved_file, hint=hint)
    try:
        saved = text.load_json(saved_file, "the saved digest")
    except FormatError as error:
        saving = format_command("digest", digest.path, "--json")
        error.hint = error.hint or f"write one by {saving} > {unused_name('saved.json')}"
        raise
    if "target_sha256" in saved:
        equal = saved["target_sha256"] == digest.sha256
        return DigestComparison(equal, () if equal else ("the whole checkpoint",))
    try:
        saved_entries = {t["key"]: (t["dtype"], tuple(t["shape"]), t["sha256"]) for t in saved["tensors"]}
    except (KeyError, TypeError) as error:
        raise FormatError("the file is neither a saved digest nor a sidecar", file=saved_file) from error
    entries = {t.key: (t.dtype, t.shape, t.sha256) for t in digest.tensors}
    different = tuple(k for k in entries if k in saved_entries and entries[k] != saved_entries[k])
    only_here = tuple(k for k in entries if k not in saved_entries)
    only_saved = tuple(k for k in saved_entries if k not in entries)
    return DigestComparison(saved.get("sha256") == digest.sha256, different, only_here, only_saved)
