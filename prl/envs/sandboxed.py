"""The program of the process that runs a reply's code: it gives up what it could do harm with, and then runs the code.

On Linux, and with the standard library alone, it has, once the code runs:

    system calls  (seccomp) no other process, program or signal, no socket, no shared memory, no folder, no change of
                  limits; threads are allowed
    files         (Landlock, where the kernel has it) Python's own to read, and those of its folder
    amounts       (resource limits) memory, CPU time, size of a file, open files
    rights        no capability, if it had any

`sandbox.py` starts it, and says what the input is and what comes back.
"""

import ctypes
import errno
import json
import math
import os
import resource
import signal
import struct
import sys
import types

READY, WITHOUT_LANDLOCK = b"ready", b"ready, without Landlock"
"""First line of the output, before the code runs; else it is what went wrong."""

THREAD, CLONE3 = 0x10000, 435
SYSTEM_CALLS: dict[str, tuple[int, int, str]] = {
    "x86_64": (
        0xC000003E,
        56,
        "57 58 59 322 62 200 234 129 297 101 310 311 312 41 29 64 68 240 319 323 298 321 248 249 250 272 308 302 160"
        " 141 251 203 142 144 314 83 258 133 259 88 266 86 265 90 91 268 92 93 94 260",
    ),
    "aarch64": (
        0xC00000B7,
        220,
        "221 281 129 130 131 138 240 117 270 271 272 198 194 190 186 180 279 282 241 280 217 218 219 97 268 261 164 140"
        " 30 122 118 119 274 34 33 36 37 52 53 54 55",
    ),
}
"""Audit architecture, clone, and what is denied: processes, programs; signals; others' memory; sockets; shared memory;
queues; userfaultfd, perf, bpf; keys; namespaces; limits and priorities; folders, nodes, links; modes and owners."""
EVERYWHERE = "424 425 428 429 430 432 434 438 440 447 452"
"""Signals, memory and files by descriptors of processes, io_uring, mounts, memfd_secret, fchmodat2."""
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo", "/dev/urandom")


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


def _hide_files(libc: ctypes.CDLL) -> bool:
    """Leave this process Python's files, and the folder that it is in; False where the kernel has no Landlock."""
    version = libc.syscall(444, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    kinds = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    fields = struct.pack("QQQ", kinds, 0, 3)[: 8 if version < 4 else 16 if version < 6 else 24]  # no signals, of 6 on
    rules = _check(libc.syscall(444, fields, ctypes.c_size_t(len(fields)), 0), "landlock_create_ruleset")
    read, write = 0b1100, (0b1_0010_0010 | 1 << 14) & kinds  # files, folders; write, remove, make, truncate files
    readable = [os.path.dirname(os.path.dirname(os.__file__)), *LIBRARIES]
    for path, allowed in [*((path, read) for path in readable), (".", read | write), (os.devnull, 0b110)]:
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
    """Deny this process the system calls above, those of other architectures, and `clone` but for threads."""
    machine = os.uname().machine
    if machine not in SYSTEM_CALLS:
        raise OSError(f"its system calls are not known on {machine}")
    architecture, clone, own = SYSTEM_CALLS[machine]
    denied = [int(number) for number in f"{own} {EVERYWHERE}".split()]
    load, equal, above, bits, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    deny = len(denied) + 9  # where the program says no
    program = [(load, 0, 0, 4), (equal, 0, deny - 2, architecture), (load, 0, 0, 0)]
    program += [(equal, deny - 4 - place, 0, number) for place, number in enumerate(denied)]
    at = len(program)
    program += [
        (above, deny - at - 1, 0, 1 << 30),
        (equal, deny - at - 1, 0, CLONE3),
        (equal, 0, 2, clone),
        (load, 0, 0, 16),
        (bits, 0, 1, THREAD),
        (answer, 0, 0, 0x7FFF0000),
        (answer, 0, 0, 0x50000 | errno.EPERM),
        (answer, 0, 0, 0x50000 | errno.ENOSYS),  # has glibc fall back to clone
    ]
    packed = b"".join(struct.pack("HBBI", *step) for step in program)
    filters = ctypes.create_string_buffer(packed, len(packed))
    header = struct.pack("HP", len(program), ctypes.addressof(filters))
    _check(libc.prctl(22, 2, header, 0, 0), "seccomp")


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
        _limit(asked["memory"], asked["written"], asked["seconds"])
        ready = READY if _hide_files(libc) else WITHOUT_LANDLOCK
        _deny_calls(libc)
    except (OSError, AttributeError) as error:
        os.write(results, str(error).encode())
        return
    os.write(results, ready + b"\n")
    reply = sys.modules["reply"] = types.ModuleType("reply")
    exec(compile(asked["code"], "reply.py", "exec"), vars(reply))
    for expression in asked["expressions"]:
        try:
            value = json.dumps(eval(expression, vars(reply)), default=sorted)
        except Exception:
            value = "raised"
        os.write(results, value.encode() + b"\n")


if __name__ == "__main__":
    _main()
