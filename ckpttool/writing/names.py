"""Temporary names, and how a whole file gets its own: by a link that fails if it is taken, or a rename."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ckpttool import behind
from ckpttool.errors import TargetExistsError, UsageError
from ckpttool.writing.outputs import Output

TEMPORARY = ".ckpttool-tmp-"
KEPT = ".ckpttool-old-"
# The name of a file system has 255 bytes, and ours begin and end with more.
_LONGEST = 180
# Temporary files of one name that are looked at: a few crashes leave a few.
_CANDIDATES = 64
# Naming files takes milliseconds, on a busy disk a second.
_LOCKED_S = 60
# Links that are followed from one to the next, as the kernel does.
_LINKS = 40
_SYSTEM = ("/dev/", "/proc/", "/sys/")
_SHARED_MEMORY = "/dev/shm/"  # noqa: S108  # an ordinary file system, which may be written to
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def hidden(name: str) -> bool:
    """Say whether a name is one that only a conversion, or one that was cut short, leaves."""
    return TEMPORARY in name or KEPT in name


def beside(file: str, mark: str, end: str) -> str:
    """Return a hidden name in the file's folder that tells what it belongs to."""
    folder, name = os.path.split(os.path.abspath(file))
    short = os.fsdecode(os.fsencode(name)[:_LONGEST])
    return os.path.join(folder, f".{short}{mark}{end}")


def temporary(target: str) -> str:
    """Return a name that nobody else has for what will be the target."""
    return beside(target, TEMPORARY, os.urandom(6).hex())


def waiting(file: str) -> list[str]:
    """Return the files that may be about to get this name: temporary ones, of a program that may be dead.

    Anybody can make a file of such a name: use only what identifies itself by its content.
    """
    folder, begin = os.path.split(beside(file, TEMPORARY, ""))
    try:
        found = sorted(name for name in os.listdir(folder) if name.startswith(begin))
    except OSError:
        return []
    return [path for name in found[:_CANDIDATES] if os.path.isfile(path := os.path.join(folder, name))]


@dataclass(slots=True)
class Written:
    """An output and the stem of its temporary name; what has been filled is identified by its inode.

    `waits` says that its main file has its name already, so that it must not be removed.
    """

    output: Output
    stem: str
    waits: bool = False
    _inode: tuple[int, int] = field(default=(0, 0), init=False)
    _made: bool = field(default=False, init=False)

    @property
    def temporary(self) -> str:
        """The name under which it is filled."""
        return self.stem + self.output.suffix

    @property
    def whole(self) -> tuple[str, str]:
        """What is renamed, and to what: the file, or the folder that it lies in."""
        return (self.stem, self.output.target) if self.output.inside else (self.temporary, self.output.file)

    @property
    def folder(self) -> str:
        """The folder in which it gets its name."""
        return os.path.dirname(os.path.abspath(self.whole[1]))

    def fill(self, disk: behind.Lane | None) -> None:
        """Write the file and check it; `disk` is the lane that takes it to the disk."""
        if self.output.inside:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.stem)  # not its parents: if these are gone, nobody wants them back
                self._made = True
            os.makedirs(os.path.dirname(self.temporary), exist_ok=True)
        with behind.new_file(self.temporary, disk) as stream:
            self._made = True
            self.output.write(stream)
        if self.output.check is not None:
            self.output.check(self.stem)

    def name(self, *, force: bool) -> None:
        """Give the file, or its folder, its name; raise TargetExistsError if it is taken, without `force`."""
        self.known()
        temporary, target = self.whole
        if self.output.inside:
            # Never replaced, for what else it holds; `rename` would take an empty one's name.
            require_free(target, "take another name")
            os.rename(temporary, target)
        elif force or self.output.replaces:
            keep_mode(temporary, target)
            os.replace(temporary, target)
        else:
            _link(temporary, target)
        self.waits = False

    def known(self) -> None:
        """Note by what the file is known, whatever its name."""
        with contextlib.suppress(FileNotFoundError):
            self._inode = _inode(self.whole[0])

    def stands(self) -> bool:
        """Return whether the file has its name."""
        with contextlib.suppress(OSError):
            return _inode(self.whole[1]) == self._inode
        return False

    def take_back(self) -> None:
        """Remove the file's name if it has it; another file of that name stays."""
        self.waits = False
        if self.stands():
            remove([self.whole[1]])

    @property
    def rest(self) -> str | None:
        """What is to be removed when all is done: the temporary file or folder, if this output made it."""
        if not self._made or self.waits:
            return None
        return self.stem if self.output.inside else self.temporary


def _inode(file: str) -> tuple[int, int]:
    found = os.lstat(file)
    return found.st_dev, found.st_ino


def require_regular(target: str) -> None:
    """Raise TargetExistsError unless the target is, or would become, a regular file of an ordinary folder.

    What lies in /dev and /proc belongs to the system, however a path leads there (`/dev/stdout`, a link to
    `/proc/self/fd/1`): replacing it would break other programs.
    """
    hop = os.path.abspath(target)
    for _ in range(_LINKS):
        folder = os.path.realpath(os.path.dirname(hop))
        if f"{folder}/".startswith(_SYSTEM) and not f"{folder}/".startswith(_SHARED_MEMORY):
            raise TargetExistsError("the target belongs to the system", file=target, hint="take another name")
        if not os.path.islink(hop):
            break
        hop = os.path.join(folder, os.readlink(hop))
    if os.path.exists(target) and not (os.path.isfile(target) or os.path.isdir(target)):
        raise TargetExistsError(
            "the target is a device, socket or pipe", file=target, hint="take another name"
        )


def require_free(target: str, hint: str = "--force replaces it") -> None:
    """Raise TargetExistsError if the name is taken, by a link that leads nowhere too."""
    if os.path.lexists(target):
        raise TargetExistsError("the target exists already", file=target, hint=hint)


def keep_mode(temporary: str, target: str) -> None:
    """Give the new file the permissions of the one that it replaces, as `cp` leaves them."""
    with contextlib.suppress(OSError):
        mode = os.lstat(target).st_mode
        if stat.S_ISREG(mode):
            os.chmod(temporary, stat.S_IMODE(mode) & 0o777)


def _link(temporary: str, target: str) -> None:
    try:
        # A hard link fails if the name is taken: of two writers exactly one wins.
        os.link(temporary, target)
    except FileExistsError:
        require_free(target)
        raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # No hard links on this filesystem: look, then rename.
        require_free(target)
        os.replace(temporary, target)


def linked(file: str, name: str) -> bool:
    """Give a file a second name; return False where the file system has no hard links."""
    try:
        os.link(file, name, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return False
    return True


@contextlib.contextmanager
def alone(folders: Iterable[str]) -> Iterator[None]:
    """Be the only one who gives names in these folders; the lock ends with the process, however that ends.

    Where a file system locks no folders (NFS), each name is still given whole, but two conversions onto one
    set of files are not kept apart.
    """
    with contextlib.ExitStack() as opened:
        for folder in sorted(set(folders)):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(os.close, descriptor)
            _lock(descriptor, folder)
        yield


def _lock(descriptor: int, folder: str) -> None:
    """Lock a folder; raise UsageError if another program holds its lock for too long."""
    end = time.monotonic() + _LOCKED_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise UsageError(
                    f"another program has locked the folder for {_LOCKED_S} s",
                    file=folder,
                    hint="try again when it is done, or write into another folder",
                ) from None
            time.sleep(0.02)
        except OSError:
            return  # no locks here
        else:
            return


def remove(files: Iterable[str]) -> None:
    """Remove files and folders as far as they are there; a second Ctrl-C does not stop that."""
    left = list(files)
    try:
        _remove(left)
    except BaseException:
        _remove(left)
        raise


def _remove(files: list[str]) -> None:
    for file in files:
        if os.path.isdir(file) and not os.path.islink(file):
            shutil.rmtree(file, ignore_errors=True)
            continue
        with contextlib.suppress(OSError):
            os.unlink(file)
