"""Foundation: trees, sources, files, errors, limits and plugins."""

from ckpttool import package_face

TYPE_CHECKING = False  # as in the package above
if TYPE_CHECKING:
    from ckpttool.core.activations import (
        ActivationTracker as ActivationTracker,
        AxisOrder as AxisOrder,
        WeightUse as WeightUse,
        framework_order as framework_order,
        plain_order as plain_order,
    )
    from ckpttool.core.atomic_write import (
        Output as Output,
        PendingFile as PendingFile,
        WorkerThread as WorkerThread,
        create_file as create_file,
        find_pending_files as find_pending_files,
        is_hidden_name as is_hidden_name,
        require_new as require_new,
        write_atomically as write_atomically,
    )
    from ckpttool.core.checkpoint import Checkpoint as Checkpoint
    from ckpttool.core.code_references import (
        CodeReference as CodeReference,
        dangerous_calls as dangerous_calls,
        merge_references as merge_references,
        relocate_references as relocate_references,
        worst_verdict as worst_verdict,
    )
    from ckpttool.core.handles import Branch as Branch, Handle as Handle, read_writable as read_writable
    from ckpttool.core.errors import (
        ChangedError as ChangedError,
        ChecksumError as ChecksumError,
        CkpttoolError as CkpttoolError,
        DeadlineError as DeadlineError,
        DeviceError as DeviceError,
        EnvironmentMismatchError as EnvironmentMismatchError,
        FormatError as FormatError,
        LimitError as LimitError,
        MappingError as MappingError,
        MissingExtraError as MissingExtraError,
        NameNotFoundError as NameNotFoundError,
        NotACheckpointError as NotACheckpointError,
        NotFoundError as NotFoundError,
        TargetExistsError as TargetExistsError,
        TruncatedError as TruncatedError,
        UnsupportedError as UnsupportedError,
        UsageError as UsageError,
        WorkerError as WorkerError,
    )
    from ckpttool.core.limits import Limits as Limits, using as using
    from ckpttool.core.plugins import Plugin as Plugin
    from ckpttool.core.remote import BlockCache as BlockCache
    from ckpttool.core.sidecar import (
        LedgerEntry as LedgerEntry,
        NotUnderstood as NotUnderstood,
        Sidecar as Sidecar,
        sidecar_path as sidecar_path,
        unknown_fact as unknown_fact,
    )
    from ckpttool.core.source import (
        Buffer as Buffer,
        Checksum as Checksum,
        DeflatedSpan as DeflatedSpan,
        File as File,
        Inline as Inline,
        KeptSource as KeptSource,
        Shape as Shape,
        Source as Source,
        Span as Span,
        StoragePart as StoragePart,
        StridedView as StridedView,
        TransformedSource as TransformedSource,
        as_array as as_array,
        combine_parts as combine_parts,
        crc32 as crc32,
        crc32c as crc32c,
        gather_bytes as gather_bytes,
        iter_pieces as iter_pieces,
    )
    from ckpttool.core.text import clean as clean, parse_strict_json as parse_strict_json, shorten as shorten
    from ckpttool.core.tree import (
        Alias as Alias,
        Container as Container,
        Leaf as Leaf,
        Path as Path,
        PathStep as PathStep,
        Record as Record,
        Role as Role,
        Tree as Tree,
        ValueLeaf as ValueLeaf,
        attr as attr,
        display as display,
        index as index,
        key as key,
    )

package_face()
