"""The process that forks workers, and what a worker does.

Importing the built-in verifiers takes over a second, a fork of a process that has them a few
milliseconds: verifiers that crash cost little.  The nursery is single-threaded, runs no user code,
sees no secrets in its environment and dies with the scorer; workers die with the nursery.

Protocol on a SEQPACKET socket: `spawn` with two descriptors (the worker's socket, its cell) →
its pid; `reap <pid> <ms>` → its wait status, or `alive`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import math
import os
import resource
import signal
import socket
import sys
import time
from typing import Any

import msgspec
from rollgrid_runtime.imports import nothing_collected

from . import watch
from .calls import LOADING, MAX_DETAIL, REPORTING, Call, Cell, ItemResult, Results, frame, receive
from .registry import BUILT_IN, Registry
from .rewards.base import Verdict, Verifier

FLUSH_S = 0.02
"""Results older than this are sent before the next sample begins; younger ones may have to be scored again."""
CALLS_PER_WORKER = 5000
CACHED_VERIFIERS = 256
MAX_TURNS = 4096
WATCHED, FREE = "watched", "free"
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Ask for SIGKILL when the parent ends; ends at once if it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Arguments: the socket's descriptor, the scorer's pid, memory limit in MiB, `watched` or `free`, extra verifiers."""
    descriptor, parent, memory_mb, network, *extra = sys.argv[1:]
    die_with_parent(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(descriptor)) as door:
        with nothing_collected():
            registry = Registry(extra)
            for target in BUILT_IN.values():
                importlib.import_module(target.partition(":")[0])
        gc.collect()
        gc.freeze()
        door.send(b"ready")
        _serve_door(door, registry, int(memory_mb), network == WATCHED)


def _serve_door(door: socket.socket, registry: Registry, memory_mb: int, watched: bool) -> None:
    nursery = os.getpid()
    while True:
        request, descriptors, _, _ = socket.recv_fds(door, 256, 2)
        if not request:
            return
        verb, _, argument = request.partition(b" ")
        if verb == b"spawn":
            pid = os.fork()
            if pid == 0:
                _become_worker(door, descriptors, registry, memory_mb, nursery, watched)
            for fd in descriptors:
                os.close(fd)
            door.send(str(pid).encode())
        else:
            dying, wait_ms = argument.split()
            door.send(_reap(int(dying), int(wait_ms) / 1e3))


def _reap(pid: int, wait_s: float) -> bytes:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            found, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return b"0"
        if found:
            return str(status).encode()
        if time.monotonic() > deadline:
            return b"alive"
        time.sleep(0.001)


def _become_worker(
    door: socket.socket, descriptors: list[int], registry: Registry, memory_mb: int, nursery: int, watched: bool
) -> None:
    code = 1
    try:
        door.close()
        os.setsid()
        die_with_parent(nursery)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(2, 1)  # what user code prints belongs into the log
        _limit(memory_mb)
        if watched:
            watch.begin()
        with socket.socket(fileno=descriptors[0]) as sock:
            Worker(sock, Cell(descriptors[1]), registry).serve()
        code = 0
    except BaseException as error:  # noqa: BLE001 - nothing may return into the nursery's own loop
        with contextlib.suppress(OSError):
            os.write(2, f"scorer worker ended: {error!r}\n".encode("utf-8", "replace"))
    finally:
        os._exit(code)


def _limit(memory_mb: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _lower(resource.RLIMIT_NOFILE, 256)
    _lower(resource.RLIMIT_FSIZE, 64 * 1024 * 1024)
    if memory_mb:
        _lower(resource.RLIMIT_AS, memory_mb * 1024 * 1024)


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))


class Worker:
    """Judges one call after the other until its socket closes."""

    def __init__(self, sock: socket.socket, cell: Cell, registry: Registry) -> None:
        self._sock, self._cell, self._registry = sock, cell, registry
        self._verifiers: dict[bytes, Verifier] = {}
        self._decoder = msgspec.msgpack.Decoder(Call)
        self._calls = 0
        self._exhausted = False

    def serve(self) -> None:
        while (body := receive(self._sock)) is not None:
            call = self._decoder.decode(body)
            self._calls += 1
            self._cell.mark(call.number, LOADING)
            try:
                verifier = self._verifier(call)
            except Exception as error:  # noqa: BLE001 - user code: its failure is the verdict
                failures = tuple(_failure(item.position, error, "", 0.0) for item in call.items)
                self._report(call, failures, last=True)
            else:
                self._judge(call, verifier)

    def _verifier(self, call: Call) -> Verifier:
        key = call.type.encode() + b"\0" + msgspec.msgpack.encode(call.params)
        found = self._verifiers.get(key)
        if found is None:
            if len(self._verifiers) >= CACHED_VERIFIERS:
                self._verifiers.clear()
            found = self._verifiers[key] = self._registry.make(call.type, call.params)
        return found

    def _judge(self, call: Call, verifier: Verifier) -> None:
        version = clean(str(getattr(verifier, "version", "")))
        done: list[ItemResult] = []
        flushed = time.monotonic()
        for item in call.items:
            if done and time.monotonic() - flushed > FLUSH_S:
                self._report(call, tuple(done), last=False)
                done, flushed = [], time.monotonic()
            self._cell.mark(call.number, item.position)
            started = time.perf_counter()
            try:
                verdict = read_verdict(verifier.score(call.shared.with_item(item)))
            except Exception as error:  # noqa: BLE001 - user code: its failure is the verdict
                self._exhausted |= isinstance(error, MemoryError)
                done.append(_failure(item.position, error, version, _since(started)))
            else:
                done.append(_result(item.position, verdict, version, _since(started)))
        self._report(call, tuple(done), last=True)

    def _report(self, call: Call, results: tuple[ItemResult, ...], *, last: bool) -> None:
        self._cell.mark(call.number, REPORTING)
        worn = last and (self._exhausted or self._calls >= CALLS_PER_WORKER)
        self._sock.sendall(frame(Results(call.number, results, last, worn)))


def read_verdict(verdict: Any) -> Verdict:
    """What a verifier returned, as a verdict of finite numbers; raises ValueError when it is none."""
    if not isinstance(verdict, Verdict):
        return Verdict(_number(verdict))
    turns = tuple(None if value is None else _number(value) for value in verdict.turn_values)
    if len(turns) > MAX_TURNS:
        raise ValueError(f"the verifier returned {len(turns)} turn values, more than {MAX_TURNS}")
    detail = None if verdict.detail is None else clean(str(verdict.detail))
    return Verdict(_number(verdict.value), detail, bool(verdict.invalid_output), turns)


def _number(given: Any) -> float:
    if isinstance(given, (str, bytes)):
        raise ValueError(f"the verifier returned the text {given[:60]!r}, not a number")
    try:
        value = float(given)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"the verifier returned {type(given).__name__}, not a number") from None
    if not math.isfinite(value):
        raise ValueError(f"the verifier returned {value}, which is not finite")
    return value


def clean(text: str) -> str:
    """The text shortened to MAX_DETAIL and encodable."""
    return text[:MAX_DETAIL].encode("utf-8", "replace").decode()


def _result(position: int, verdict: Verdict, version: str, duration_ms: float) -> ItemResult:
    return ItemResult(
        position, verdict.value, verdict.invalid_output, verdict.detail, version, duration_ms, verdict.turn_values,
        watch.seen(),
    )  # fmt: skip


def _failure(position: int, error: Exception, version: str, duration_ms: float) -> ItemResult:
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - an exception whose own text fails
        text = type(error).__name__
    return ItemResult(position, None, False, clean(text), version, duration_ms, network=watch.seen())


def _since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3


if __name__ == "__main__":
    main()
