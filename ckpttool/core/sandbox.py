"""Restrict the process that opens a file with a framework: no network, no programs, no other files.

`restrict` cannot be undone, and applies to all threads of the process. It uses what the system offers:

- Landlock (docs.kernel.org/userspace-api/landlock.html) for files, TCP ports, signals and abstract sockets
- a seccomp filter (docs.kernel.org/userspace-api/seccomp_filter.html) for system calls
- resource limits (getrlimit(2)) for memory, file sizes and core files

What is missing is returned, so that the caller can name it. The syntax is Python 3.7's: interpreters of other
environments run this code.
"""

from __future__ import annotations

import contextlib
import glob
import json
import mmap
import os
import platform
import struct
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ckpttool.core.deferred import NamedTuple

try:
    import ctypes
except ImportError:  # an interpreter without libffi
    ctypes = None  # type: ignore[assignment]

NETWORK, PROGRAMS, WRITES, READS, MEMORY = (
    "network access",
    "new processes",
    "writes outside its folder",
    "reads of other files",
    "memory use",
)


class Protections(NamedTuple):
    """What a process cannot do any more, and per protection that the system lacks, the reason."""

    active: tuple[str, ...]
    missing: dict[str, str]

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"protections": list(self.active), "missing": dict(self.missing)}


def describe_missing(name: str, missing: dict[str, str]) -> str:
    """Return what a process called `name` is not protected from, as a sentence; "" if nothing is missing."""
    reasons = (
        "{} ({})".format(
            ", ".join(protection for protection in missing if missing[protection] == reason), reason
        )
        for reason in dict.fromkeys(missing.values())
    )
    return "{} ran without protection from {}".format(name, "; ".join(reasons)) if missing else ""


_LAST_NUMBER = 462  # mseal
REFUSED = {
    # new programs and processes, and access to others
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "kcmp": (312, 272),
    "tkill": (200, 130),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "setpriority": (141, 140),
    "setpgid": (109, 154),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    # network, and other channels to processes
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    # attributes of files, which Landlock does not cover; links in the folder that the parent process reads
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "truncate": (76, 45),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    # limits and identity
    "setrlimit": (160, 164),
    "personality": (135, 92),
    "setuid": (105, 146),
    "setgid": (106, 144),
    "setreuid": (113, 145),
    "setregid": (114, 143),
    "setresuid": (117, 147),
    "setresgid": (119, 149),
    "setgroups": (116, 159),
    "setfsuid": (122, 151),
    "setfsgid": (123, 152),
    "capset": (126, 91),
    "setns": (308, 268),
    "unshare": (272, 97),
    # the system
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "adjtimex": (159, 171),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
}
# Calls that are allowed for some arguments only; _judge_arguments has the rules.
CONDITIONAL = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "kill": (62, 129),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "sendto": (44, 206),
}
# linux/audit.h; the calls seccomp and prctl.
_ARCHITECTURES = {"x86_64": (0, 0xC000003E, 317), "aarch64": (1, 0xC00000B7, 277)}

# linux/bpf_common.h, linux/seccomp.h: the operations of a filter, and its results.
_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_CLONE_THREAD = 0x00010000
_SIGNAL_OWNERS = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: signals to another process
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: characters typed into the user's terminal


def filter_program(machine: str, pid: int) -> bytes:
    """Return the seccomp filter for a process; raise KeyError for a machine without a table.

    Sources: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h of Linux 6.12. Calls
    after the last one of the table get ENOSYS, as from a kernel without them: what they do is not known here.
    """
    column, audit, _ = _ARCHITECTURES[machine]
    program = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, audit), (_RETURN, 0, 0, _KILL)]
    program += [(_LOAD, 0, 0, _NUMBER), (_GREATER, 0, 1, _LAST_NUMBER), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    for name, numbers in REFUSED.items():
        if numbers[column] is not None:
            del name
            program += [(_EQUAL, 0, 1, int(numbers[column] or 0)), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    for name, both in CONDITIONAL.items():
        rule = _judge_arguments(name, pid)
        program += [(_EQUAL, 0, len(rule), both[column]), *rule]
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _judge_arguments(name: str, pid: int) -> list[tuple[int, int, int, int]]:
    """Return the instructions that judge the arguments of a call; they always return."""
    refused, allowed = (_RETURN, 0, 0, _ERRNO | _EPERM), (_RETURN, 0, 0, _ALLOW)

    def load(argument: int, half: int = 0) -> tuple[int, int, int, int]:
        return (_LOAD, 0, 0, _ARGUMENTS + 8 * argument + 4 * half)

    if name == "clone":  # threads only
        return [load(0), (_ANY_BIT, 1, 0, _CLONE_THREAD), refused, allowed]
    if name == "clone3":  # its flags are behind a pointer: without it, libraries use clone
        return [(_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    if name == "prlimit64":  # to read limits
        return [load(2), (_EQUAL, 0, 3, 0), load(2, 1), (_EQUAL, 0, 1, 0), allowed, refused]
    if name == "sendto":  # no address: there are no sockets but inherited ones
        return [refused]
    if name == "sched_setaffinity":  # of the calling thread
        return [load(0), (_EQUAL, 1, 0, 0), refused, allowed]
    if name == "fcntl":
        own, signal, own_ex = _SIGNAL_OWNERS
        return [
            load(1),
            (_EQUAL, 2, 0, own),
            (_EQUAL, 1, 0, signal),
            (_EQUAL, 0, 1, own_ex),
            refused,
            allowed,
        ]
    if name == "ioctl":
        first, second = _TERMINAL_INPUT
        return [load(1), (_EQUAL, 1, 0, first), (_EQUAL, 0, 1, second), refused, allowed]
    # signals to this process
    return [load(0), (_EQUAL, 1, 0, pid), refused, allowed]


_NO_NEW_PRIVILEGES = 38  # linux/prctl.h
_SET_FILTER, _ALL_THREADS, _NO_SPECULATION_RULE = 1, 1, 4  # linux/seccomp.h


def _system_call(library: Any, number: int, *arguments: Any) -> int:
    words = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return int(library.syscall(ctypes.c_long(number), *words))


def _filter_calls(library: Any) -> str:
    """Install the filter for all threads; return why that is impossible, "" if it is not."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES or struct.calcsize("P") != 8:
        return f"no table of system calls for {machine or 'this machine'}"
    program = filter_program(machine, os.getpid())
    buffer = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of instructions, and their address
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    number = _ARCHITECTURES[machine][2]
    for flags in (_ALL_THREADS | _NO_SPECULATION_RULE, _ALL_THREADS):
        if _system_call(library, number, _SET_FILTER, flags, header) == 0:
            return ""
    return "this system has no seccomp filters"


_CREATE, _ADD, _RESTRICT = 444, 445, 446
_ASK_VERSION, _BENEATH = 1, 1
_EXECUTE, _WRITE, _READ, _LIST, _REMOVE_FOLDER, _REMOVE = (1 << n for n in range(6))
_MAKE_FOLDER, _MAKE_FILE, _REFER, _TRUNCATE, _DEVICE_CONTROL = 1 << 7, 1 << 8, 1 << 13, 1 << 14, 1 << 15
_READING = _READ | _LIST
_WRITING = _WRITE | _REMOVE_FOLDER | _REMOVE | _MAKE_FOLDER | _MAKE_FILE | _REFER | _TRUNCATE
_OF_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE | _DEVICE_CONTROL
# The number of rights in each version of the interface.
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
_ALL_RIGHTS = 16
_TCP = 1 << 0 | 1 << 1  # bind, connect: version 4
_SCOPES = 1 << 0 | 1 << 1  # abstract Unix sockets, signals: version 6


def _restrict_files(library: Any, rules: Iterable[tuple[str, int]], *, reads: bool) -> str:
    """Restrict files for all threads; return why that is impossible, "" if it is not.

    Source: include/uapi/linux/landlock.h.
    """
    version = _system_call(library, _CREATE, None, 0, _ASK_VERSION)
    if version < 1:
        return "this system has no Landlock"
    handled = (1 << _RIGHTS.get(version, _ALL_RIGHTS)) - 1
    handled &= -1 if reads else ~(_READING | _EXECUTE)
    size = 8 if version < 4 else 16 if version < 6 else 24
    attributes = struct.pack("=QQQ", handled, _TCP, _SCOPES)[:size]
    ruleset = _system_call(library, _CREATE, attributes, size, 0)
    if ruleset < 0:
        return "Landlock refuses the rules"
    try:
        for path, rights in rules:
            _add_rule(library, ruleset, path, rights & handled)
        tasks = os.open("/proc/self/task", os.O_RDONLY | os.O_DIRECTORY)  # the rules may forbid it later
        try:
            others = _list_threads(tasks)
            if _system_call(library, _RESTRICT, ruleset, 0) != 0:
                return "Landlock refuses the rules"
            restricted = not others or _restrict_threads(library, ruleset, tasks)
            return "" if restricted else "threads of the program run already"
        finally:
            os.close(tasks)
    except OSError as error:
        return f"its threads cannot be listed: {error.strerror}"
    finally:
        os.close(ruleset)


def _add_rule(library: Any, ruleset: int, path: str, rights: int) -> None:
    """Grant rights below a path; one that does not exist gets none."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not os.path.isdir("/proc/self/fd/%d" % descriptor):  # noqa: UP031 - as fast as the rest
            rights &= _OF_FILES
        if rights:
            _system_call(library, _ADD, ruleset, _BENEATH, struct.pack("=Qi", rights, descriptor), 0)
    finally:
        os.close(descriptor)


_SIGNAL = 63
_WAIT_S = 2.0
_KEPT = []  # type: list[Any]


def _list_threads(tasks: int) -> list[int]:
    """Return the other threads of this process; `tasks` is its open folder of threads."""
    import threading

    own = threading.get_native_id() if hasattr(threading, "get_native_id") else os.getpid()
    return [int(thread) for thread in os.listdir(tasks) if int(thread) != own]


def _handler_code(ruleset: int, counter: int) -> bytes:
    """Return a signal handler for x86_64: landlock_restrict_self(ruleset, 0), then count a success."""
    return b"".join(
        (
            b"\xb8" + struct.pack("<I", _RESTRICT),  # mov eax, number
            b"\xbf" + struct.pack("<I", ruleset),  # mov edi, ruleset
            b"\x31\xf6\x0f\x05",  # xor esi, esi; syscall
            b"\x48\xba" + struct.pack("<Q", counter),  # mov rdx, counter
            b"\x85\xc0\x75\x03",  # test eax, eax; jnz 3
            b"\xf0\xff\x02\xc3",  # lock inc dword [rdx]; ret
        )
    )


def _restrict_threads(library: Any, ruleset: int, tasks: int) -> bool:
    """Restrict the threads that run already; return whether that succeeded for all of them.

    Landlock restricts the calling thread and those that it starts. Threads that run already get a signal,
    whose handler makes the same system call there. It is machine code, because a handler in Python may need a
    lock that the interrupted thread holds.
    """
    if platform.machine() != "x86_64":
        return False
    counter = ctypes.c_uint32(0)
    try:
        code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:
        return False
    code.write(_handler_code(ruleset, ctypes.addressof(counter)))
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    _KEPT.extend((code, counter))  # a thread may get its signal later
    library.mprotect(ctypes.c_void_p(address), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC)
    library.signal.argtypes, library.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    library.signal(_SIGNAL, address)
    done = {}  # type: dict[int, bool]
    while True:
        new = [thread for thread in _list_threads(tasks) if thread not in done]
        if not new:
            return all(done.values())
        for thread in new:
            done[thread] = _signal_thread(library, thread, counter)


def _signal_thread(library: Any, thread: int, counter: Any) -> bool:
    """Run the handler in a thread; return whether the thread is restricted, or has ended."""
    before, deadline = counter.value, time.monotonic() + _WAIT_S
    _system_call(library, CONDITIONAL["tgkill"][0], os.getpid(), thread, _SIGNAL)
    while time.monotonic() < deadline:
        if counter.value > before or not os.path.exists("/proc/self/task/%d" % thread):  # noqa: UP031
            return True
        time.sleep(0.0001)
    return False


def _limit_memory(memory: int) -> str:
    """Limit memory and file sizes to `memory` bytes; return why that is impossible, "" if it is not."""
    try:
        import resource
    except ImportError:
        return "this system has no resource limits"
    for name, value in (("CORE", 0), ("FSIZE", memory), ("DATA", memory)):
        limit = getattr(resource, "RLIMIT_" + name)
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(limit, (value, value))
        except (ValueError, OSError) as error:
            return f"this system refuses the limit: {error}"
    # Other systems do not count anonymous mappings, which large arrays are.
    return "" if sys.platform.startswith("linux") else "this system does not limit the memory of a process"


def restrict(
    reads: Sequence[str] | None,
    writes: Sequence[str] = (),
    *,
    listed: Sequence[str] = (),
    devices: Sequence[str] = (),
    memory: int | None = None,
) -> Protections:
    """Restrict this process for the rest of its life; return what it is protected from.

    No path that is granted has to exist. A path of a folder grants everything below it.

    Args:
        reads: files and folders that may be read; None does not restrict reads.
        writes: folders in which files may be read and changed.
        listed: folders whose names may be listed.
        devices: devices that may be read, written and controlled.
        memory: bytes of private memory; None does not limit it.
    """
    missing = {}  # type: dict[str, str]
    if memory is not None:
        missing[MEMORY] = _limit_memory(memory)
    if sys.platform.startswith("linux") and hasattr(os, "O_PATH") and ctypes is not None:
        library = ctypes.CDLL(None, use_errno=True)
        library.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        missing[NETWORK] = missing[PROGRAMS] = _filter_calls(library)
        rules = [(path, _READING | _WRITING) for path in writes]
        rules += [(path, _READING) for path in reads or ()]
        rules += [(path, _LIST) for path in listed]
        rules += [(path, _READING | _WRITE | _DEVICE_CONTROL) for path in devices]
        missing[WRITES] = _restrict_files(library, rules, reads=reads is not None)
    else:
        linux = sys.platform.startswith("linux")
        reason = "this Python has no ctypes" if linux else f"no sandbox is known for {sys.platform}"
        missing.update(dict.fromkeys((NETWORK, PROGRAMS, WRITES), reason))
    if reads is not None:
        missing[READS] = missing[WRITES]
    active = tuple(name for name, reason in missing.items() if not reason)
    return Protections(active, {name: reason for name, reason in missing.items() if reason})


_SYSTEM = (
    *("/usr", "/lib", "/lib32", "/lib64", "/nix/store", "/gnu/store", "/etc/ld.so.cache", "/etc/localtime"),
    *("/etc/ssl/openssl.cnf", "/dev/null", "/dev/urandom", "/dev/random", "/dev/zero", "/proc/self"),
    *("/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/sys/vm", "/proc/filesystems", "/proc/version"),
    *("/sys/devices/system", "/sys/fs/cgroup", "/sys/kernel/mm/transparent_hugepage"),
)
_DEVICES = ("/dev/nvidia*", "/dev/kfd", "/dev/dri")
_OF_DEVICES = ("/proc/driver", "/proc/devices", "/proc/modules", "/sys/devices", "/sys/bus", "/sys/class")
_LOADER_FOLDERS = ("/etc/ld.so.conf", "/etc/ld.so.conf.d/*.conf")
# Below the home folder of the user, programs keep settings and caches: these variables name other folders.
_HOMES = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "MPLCONFIGDIR", "TORCH_HOME")
_KERAS_HOME, _KERAS_SETTINGS = "KERAS_HOME", "keras.json"
_EXECUTABLE = (
    *(b"\x7fELF", b"MZ", b"\xfe\xed\xfa\xce", b"\xfe\xed\xfa\xcf", b"\xce\xfa\xed\xfe"),
    *(b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe"),
)


def _library_paths() -> list[str]:
    """Return where the interpreter and its packages are, and the libraries of the system."""
    paths = [*_SYSTEM, sys.prefix, sys.base_prefix, sys.exec_prefix, *(path for path in sys.path if path)]
    paths += filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    paths.append(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    for path in sorted(path for pattern in _LOADER_FOLDERS for path in glob.glob(pattern)):
        with contextlib.suppress(OSError), open(path, errors="replace") as file:
            paths += (line.strip() for line in file if line.startswith("/"))
    for finder in sys.meta_path:  # packages in development: setuptools' finders name their folders
        mapping = getattr(sys.modules.get(getattr(finder, "__module__", "")), "MAPPING", None)
        paths += (str(path) for path in mapping.values()) if isinstance(mapping, dict) else ()
    return paths


def _is_data(path: str) -> bool:
    """Return whether a path is a file, and no shared library or program, which the linker would load."""
    try:
        if not os.path.isfile(path):
            return False
        with open(path, "rb") as file:
            return not file.read(4).startswith(_EXECUTABLE)
    except OSError:
        return False


def _use_private_homes(folder: str) -> None:
    """Let programs keep settings and caches in a folder; Keras keeps the settings of the user."""
    keras = os.environ.get(_KERAS_HOME) or os.path.join(os.path.expanduser("~"), ".keras")
    os.environ.update(dict.fromkeys((*_HOMES, _KERAS_HOME), folder))
    with contextlib.suppress(OSError):
        with open(os.path.join(keras, _KERAS_SETTINGS), "rb") as source:
            data = source.read(1 << 16)
        with open(os.path.join(folder, _KERAS_SETTINGS), "wb") as target:
            target.write(data)


class Confinement:
    """The restrictions of a process that opens a checkpoint with a framework.

    Args:
        folder: the folder of the process, which its parent reads and removes.
        files: the files of the checkpoint; None does not restrict reads.
        memory: bytes of private memory.
    """

    def __init__(self, folder: str, files: Sequence[str] | None, memory: int) -> None:
        self._folder, self._files, self._memory = folder, files, memory
        self.protections = None  # type: Protections | None

    def use_temporary_folder(self) -> None:
        """Keep temporary files in the folder of the process."""
        import tempfile

        temporary = os.path.join(self._folder, "tmp")
        os.makedirs(temporary, exist_ok=True)
        os.environ.update(dict.fromkeys(("TMPDIR", "TEMP", "TMP"), temporary))
        tempfile.tempdir = temporary

    def apply(self) -> None:
        """Restrict the process, once."""
        if self.protections is not None:
            return
        self.use_temporary_folder()
        sys.dont_write_bytecode = True
        devices = [path for pattern in _DEVICES for path in glob.glob(pattern)]
        writes = [self._folder]
        if self._files is None:
            self.protections = restrict(None, [*writes, "/dev/null"], devices=devices, memory=self._memory)
            return
        _use_private_homes(os.environ["TMPDIR"])
        reads = _library_paths() + (list(_OF_DEVICES) if devices else [])
        reads += filter(_is_data, self._files)
        listed = [os.path.dirname(file) for file in self._files]
        self.protections = restrict(
            reads, writes, listed=listed, devices=[*devices, "/dev/null"], memory=self._memory
        )


_CURRENT = []  # type: list[Confinement]


def begin(folder: str, settings: str) -> None:
    """Restrict this process as its parent requests: `files`, `memory`, and whether `now` or later."""
    record = json.loads(settings)
    _CURRENT[:] = [Confinement(folder, record["files"], record["memory"])]
    _CURRENT[0].use_temporary_folder()
    if record["now"]:
        _CURRENT[0].apply()


def confine() -> None:
    """Restrict this process now if it began with a later restriction: it has run the user's own code."""
    for confinement in _CURRENT:
        confinement.apply()


def protections() -> Protections | None:
    """Return what this process is protected from, None if nothing is restricted."""
    return _CURRENT[0].protections if _CURRENT else None


def settings(files: Iterable[str] | None, memory: int, *, now: bool) -> str:
    """Return the argument of `begin`."""
    return json.dumps({"files": None if files is None else list(files), "memory": memory, "now": now})


def iter_saved_model_files(folder: str) -> Iterator[str]:
    """Yield the files that TensorFlow reads of a SavedModel, each by its name; links lead nowhere else."""
    own = os.path.join(os.path.realpath(folder), "")
    for pattern in _SAVED_MODEL:
        for path in glob.iglob(os.path.join(glob.escape(folder), pattern)):
            if os.path.isfile(path) and os.path.realpath(path).startswith(own):
                yield path


# tensorflow/python/saved_model/constants.py
_SAVED_MODEL = (
    *("saved_model.*", "fingerprint.pb", "keras_metadata.pb", "variables/variables.*"),
    *("assets/*", "assets.extra/*"),
)
