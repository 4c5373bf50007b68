"""The program of the process that runs a reply's code: it gives up what it could do harm with, and then runs the code.

On Linux, and with the standard library alone, it has, once the code runs:

    system calls  (seccomp) those that compute, start threads, and make, read and write files: no other process,
                  program or signal, no socket, no pipe, no shared memory, no folder, nothing removed or renamed
    files         (Landlock, where the kernel has it) the standard library's to read, and those of its folder
    amounts       (resource limits) memory, CPU time, size of a file, open files
    rights        no capability, if it had any

`sandbox.py` starts it, and says what the input is and what comes back.
"""

import ctypes
import errno
import importlib
import json
import math
import os
import resource
import signal
import struct
import sys
import types
from typing import Any

READY, WITHOUT_LANDLOCK = b"ready", b"ready, without Landlock"
"""First line of the output, before the code runs; else it is what went wrong."""

THREAD, CLONE3, UNNAMED_FILE, COPY_AND_CLOSE = 0x10000, 435, 0x400000, 1030
"""Flag of `clone`; a system call; flag of `openat`, for a file that nobody can count; a command of `fcntl`."""
SYSTEM_CALLS: dict[str, tuple[int, int, int, int, str]] = {
    "x86_64": (
        0xC000003E,
        56,
        72,
        257,
        "0 1 3 5 8 17 18 19 20 74 75 77 32 33 292 4 6 21 79 89 217 262 267 269 9 10 11 12 25 28 7 23 270 271 13 14 15"
        " 131 24 35 202 230 60 231 39 110 186 102 104 107 108 63 96 98 99 100 201 204 218 219 228 229 273 309 318 332"
        " 334 439",
    ),
    "aarch64": (
        0xC00000B7,
        220,
        25,
        56,
        "63 64 57 80 62 67 68 65 66 82 83 46 23 24 48 17 78 61 79 222 226 215 214 216 233 72 73 134 135 139 132 124 101"
        " 98 115 93 94 172 173 178 174 175 176 177 160 169 165 179 153 123 96 128 113 114 99 168 278 291 293 439",
    ),
}
"""Audit architecture, clone, fcntl, openat, and what else is allowed: open files; folders to look at; memory; waiting;
signals' handlers; threads and their end; who and when it is."""
LIBRARIES = ("/etc/ld.so.cache", "/usr/share/zoneinfo", "/dev/urandom")


def _check(result: int, what: str) -> int:
    if result < 0:
        raise OSError(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def _limit(memory: int, file: int, seconds: float) -> None:
    limits = {"AS": memory, "FSIZE": file, "CPU": math.ceil(seconds) + 1, "NOFILE": 32, "CORE": 0}
    for name, amount in limits.items():
        which = getattr(resource, f"RLIMIT_{name}")
        _, most = resource.getrlimit(which)
        amount = amount if most == resource.RLIM_INFINITY else min(amount, most)
        resource.setrlimit(which, (amount, amount))


def _without_packages(folder: str) -> list[str]:
    """Return what is in a folder, but for Pythons and what is installed in them, where the answers may lie."""
    packages = ("site-packages", "dist-packages", "python")
    return [entry.path for entry in os.scandir(folder) if not entry.name.startswith(packages)]


def _libraries() -> list[str]:
    folders = {os.path.realpath(path) for path in ("/lib", "/lib64", "/usr/lib", "/usr/lib64") if os.path.isdir(path)}
    return [path for folder in folders for path in _without_packages(folder)]


def _load(packages: list[str]) -> list[str]:
    """Import installed packages by their folders; return these, and those of their libraries."""
    for folder in packages:
        place, name = os.path.split(folder)
        sys.path.append(place)
        importlib.import_module(name)
        sys.path.remove(place)
    return [each for folder in packages for each in (folder, f"{folder}.libs")]


def _hide_files(libc: ctypes.CDLL, packages: list[str]) -> bool:
    """Leave this process files of Python and `packages`, and its own folder; False where the kernel has no Landlock."""
    version = libc.syscall(444, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    kinds = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    fields = struct.pack("QQQ", kinds, 0, 3)[: 8 if version < 4 else 16 if version < 6 else 24]  # no signals, of 6 on
    rules = _check(libc.syscall(444, fields, ctypes.c_size_t(len(fields)), 0), "landlock_create_ruleset")
    read, write = 0b1100, (0b1_0000_0010 | 1 << 14) & kinds  # files, folders; write, make, truncate files
    standard = os.path.dirname(os.__file__)
    readable = [(path, read) for path in [*_without_packages(standard), *LIBRARIES, *_libraries(), *packages]]
    for path, allowed in [*readable, (standard, 0b1000), (".", read | write), (os.devnull, 0b110)]:
        if not os.path.exists(path):
            continue
        place = os.open(path, os.O_PATH)
        if not os.path.isdir(path):
            allowed &= 0b110
        rule = struct.pack("=Qi", allowed, place)
        _check(libc.syscall(445, rules, 1, rule, 0), "landlock_add_rule")
        os.close(place)
    _check(libc.syscall(446, rules, 0), "landlock_restrict_self")
    os.close(rules)
    return True


def _deny_calls(libc: ctypes.CDLL) -> None:
    """Leave this process the system calls above: of `clone` threads, of `fcntl` what signals nobody."""
    machine = os.uname().machine
    if machine not in SYSTEM_CALLS:
        raise OSError(f"its system calls are not known on {machine}")
    architecture, clone, fcntl, openat, others = SYSTEM_CALLS[machine]
    load, equal, at_least, bits, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, deny, absent = ((answer, 0, 0, what) for what in (0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS))
    number, first, second, third = ((load, 0, 0, at) for at in (0, 16, 24, 32))  # the call, and its arguments
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), deny, number]
    program += [(equal, 0, 1, CLONE3), absent]  # has glibc fall back to clone
    program += [(equal, 0, 4, clone), first, (bits, 0, 1, THREAD), allow, deny]
    program += [(equal, 0, 5, fcntl), second, (equal, 1, 0, COPY_AND_CLOSE), (at_least, 1, 0, 5), allow, deny]
    program += [(equal, 0, 4, openat), third, (bits, 1, 0, UNNAMED_FILE), allow, deny]
    for each in others.split():
        program += [(equal, 0, 1, int(each)), allow]
    program.append(deny)
    packed = b"".join(struct.pack("HBBI", *step) for step in program)
    filters = ctypes.create_string_buffer(packed, len(packed))
    header = struct.pack("HP", len(program), ctypes.addressof(filters))
    _check(libc.prctl(22, 2, header, 0, 0), "seccomp")


def literal(value: Any) -> str:
    """Return the Python literal of a value, a subclass's as of its class. Raises TypeError where it has none.

    That of a number of another class is of the integer or float that equals it: `numpy.int64(7)`, `Decimal(7)`.
    """
    if value is None:
        return "None"
    for kind in (bool, int, float, complex, str, bytes):
        if isinstance(value, kind):
            return kind.__repr__(value)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{literal(key)}: {literal(each)}' for key, each in value.items())}}}"
    if not isinstance(value, list | tuple | set | frozenset):
        for number in (int(value), float(value)) if hasattr(value, "__float__") else ():
            if value == number:
                return repr(number)
        raise TypeError(f"{type(value).__name__} has no literal")
    parts = "".join(f"{literal(each)}, " for each in value)
    if isinstance(value, list | tuple):
        return f"[{parts}]" if isinstance(value, list) else f"({parts})"
    return f"{{{parts}}}" if parts else "set()"


def _main() -> None:
    """Run what the input asks, and write a line for each expression."""
    asked = json.load(sys.stdin)
    results, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        _check(libc.prctl(1, signal.SIGKILL, 0, 0, 0), "prctl")  # ends with the thread that started it
        _check(libc.prctl(38, 1, 0, 0, 0), "no_new_privs")
        _check(libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)), "capset")
        packages = _load(asked["packages"])
        _limit(asked["memory"], asked["written"], asked["seconds"])
        ready = READY if _hide_files(libc, packages) else WITHOUT_LANDLOCK
        _deny_calls(libc)
    except (OSError, AttributeError) as error:
        os.write(results, str(error).encode())
        return
    os.write(results, ready + b"\n")
    reply = sys.modules["reply"] = types.ModuleType("reply")
    for code in asked["code"]:
        exec(compile(code, "reply.py", "exec"), vars(reply))
    for statements, expression in asked["expressions"]:
        try:
            exec(compile(statements, "tests.py", "exec"), vars(reply))
            value = literal(eval(expression, vars(reply)))
        except Exception:
            value = "raised"
        os.write(results, value.encode() + b"\n")


if __name__ == "__main__":
    _main()
