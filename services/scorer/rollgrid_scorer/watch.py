"""Workers without network, for checking verifiers: what is enforced, and what is only seen.

`begin` moves the process into a network namespace of its own, which holds no interface but a dead
loopback: native code reaches nothing either.  Where the kernel refuses that (many containers do), an
audit hook alone refuses Python's socket calls; native code is then neither seen nor stopped.  In both
cases the attempts of Python code are remembered for the report.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_EVENTS = frozenset(
    {
        "socket.connect",
        "socket.sendto",
        "socket.sendmsg",
        "socket.bind",
        "socket.getaddrinfo",
        "socket.gethostbyname",
        "socket.gethostbyaddr",
        "socket.getnameinfo",
    }
)
MAX_SEEN = 4
_seen: list[str] = []


class NetworkRefused(PermissionError):
    """A verifier asked for the network."""


def isolate() -> bool:
    """Leave the network for good; False where the kernel does not allow it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() == 0 and libc.unshare(_CLONE_NEWNET) == 0:
        return True
    return bool(libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0)


def begin() -> None:
    """From here on this process has no network; there is no way back."""
    isolate()
    sys.addaudithook(_refuse)


def seen() -> tuple[str, ...]:
    """Attempts since the last call."""
    found = tuple(_seen)
    _seen.clear()
    return found


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _EVENTS:
        if len(_seen) < MAX_SEEN:
            _seen.append(f"{event}{arguments[1:] if event.startswith('socket.connect') else ''}"[:120])
        raise NetworkRefused(f"{event}: a verifier has no network")


def enforcement() -> str:
    """What `begin` enforces on this machine, in words; tried in a process of its own."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if isolate() else 1)
    _, status = os.waitpid(pid, 0)
    if os.waitstatus_to_exitcode(status) == 0:
        return "none: workers ran in a network namespace without interfaces; Python's attempts were also reported"
    return "Python's socket calls were refused and reported; native code was not (this kernel allows no namespace)"
