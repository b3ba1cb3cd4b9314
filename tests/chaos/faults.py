"""Faults, drawn from a seed: what is done to which process, at a moment or at a boundary of the flow.

A boundary is a message seen on the wire: the process that just wrote it, or is about to read it, is
killed before it can take the next step.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import nats
from nats.aio.msg import Msg

from tests.support.servers import NatsServer
from tests.support.stack import Stack


class Fault(NamedTuple):
    """`kind` is kill | pause | flush; `boundary` a subject to wait for, "" = at once."""

    kind: str
    target: str
    down_s: float = 0.0
    boundary: str = ""

    def __str__(self) -> str:
        at = f" at {self.boundary}" if self.boundary else ""
        return f"{self.kind} {self.target} for {self.down_s:.2f} s{at}"


JOB = "rg.0.jobs.>"
FINISHED = "rg.0.samples.>"
CLOSED = "rg.0.trajectories.>"
ACK = "$JS.ACK.>"
REPLY = "rg.reply.>"
LEDGER_WRITE = "$KV.rg_ledger.>"
BOUNDARY_WAIT_S = 3.0


def deck(plan_samplers: int, loggers: int, ack_wait_s: float, draw: random.Random) -> list[Fault]:
    """Every fault of the storm once, shuffled: each process at a random moment and at its boundaries."""
    samplers = [f"sampler-{number}" for number in range(plan_samplers)]
    ledger = ["trajectory_logger"] if loggers == 1 else [f"trajectory_logger-{number}" for number in range(loggers)]
    down = lambda: draw.uniform(0.0, 1.5)  # noqa: E731 - one draw per card
    cards = [
        *(Fault("kill", sampler, down()) for sampler in samplers),
        Fault("kill", draw.choice(samplers), down(), JOB),
        Fault("kill", draw.choice(samplers), down(), FINISHED),
        Fault("kill", draw.choice(samplers), down(), ACK),
        Fault("kill", draw.choice(samplers), down(), REPLY),
        Fault("kill", "ingest", down()),
        Fault("kill", "ingest", down(), JOB),
        Fault("kill", "ingest", down(), REPLY),
        Fault("kill", "scorer", down()),
        Fault("kill", "scorer", down(), "rg.0.samples.verifier.>"),
        *(Fault("kill", logger, down()) for logger in ledger),
        *(Fault("kill", logger, down(), CLOSED) for logger in ledger),
        Fault("kill", draw.choice(ledger), down(), FINISHED),
        Fault("kill", draw.choice(ledger), down(), LEDGER_WRITE),
        Fault("kill", "nats", draw.uniform(0.0, 0.5)),
        Fault("kill", "nats", draw.uniform(0.0, 0.5), FINISHED),
        Fault("kill", "nats", draw.uniform(0.0, 0.5), CLOSED),
        Fault("kill", "checkpoint_sync", down()),
        Fault("kill", "reader", 0.0),
        Fault("kill", "reader", 0.0, CLOSED),
        Fault("pause", draw.choice(samplers), 2 * ack_wait_s),
        Fault("pause", draw.choice(samplers), 2 * ack_wait_s, JOB),
        *(Fault("pause", logger, 2 * ack_wait_s) for logger in ledger),
        Fault("pause", "scorer", 2 * ack_wait_s),
        Fault("pause", "weed", 2 * ack_wait_s),
        Fault("pause", "nats", ack_wait_s),
        Fault("flush", "valkey"),
    ]
    draw.shuffle(cards)
    return cards


class WireTap:
    """Watches NATS on a thread of its own and says when a subject was used."""

    def __init__(self, server: NatsServer) -> None:
        self._server = server
        self._waiting: dict[str, threading.Event] = {}
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="wire-tap", daemon=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def start(self) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._connect(), self._loop).result(20)

    async def _connect(self) -> None:
        async def ignore(_: Exception) -> None:
            return

        self._client = await nats.connect(
            self._server.url,
            user=self._server.user,
            password=self._server.password,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.1,
            error_cb=ignore,
        )
        for subject in (JOB, FINISHED, CLOSED, ACK, REPLY, LEDGER_WRITE):
            await self._client.subscribe(subject, cb=self._seen)

    async def _seen(self, msg: Msg) -> None:
        with self._lock:
            for pattern, event in self._waiting.items():
                if _matches(pattern, msg.subject):
                    event.set()

    def wait_for(self, pattern: str, timeout_s: float) -> bool:
        """Whether a message on `pattern` came within `timeout_s`."""
        with self._lock:
            event = self._waiting.setdefault(pattern, threading.Event())
            event.clear()
        return event.wait(timeout_s)

    def stop(self) -> None:
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)


def _matches(pattern: str, subject: str) -> bool:
    return subject.startswith(pattern.removesuffix(">"))


@contextlib.contextmanager
def tapped(server: NatsServer) -> Iterator[WireTap]:
    tap = WireTap(server)
    tap.start()
    try:
        yield tap
    finally:
        tap.stop()


class Storm:
    """Plays faults against a stack from the main thread; what is down comes back by itself."""

    def __init__(self, pipe: Stack, tap: WireTap, say: Callable[[str], None]) -> None:
        self.pipe, self._tap, self._say = pipe, tap, say
        self.extra: dict[str, Callable[[], None]] = {}
        self._due: list[tuple[float, Fault]] = []
        self.played = 0

    def play(self, faults: Iterator[Fault], until: float, pause: Callable[[], float]) -> None:
        """Faults one after the other until the monotonic time `until`, then everything back."""
        while time.monotonic() < until:
            self.strike(next(faults))
            resume_at = time.monotonic() + pause()
            while time.monotonic() < min(resume_at, until):
                self.mend(time.monotonic())
                time.sleep(0.02)
        self.mend(float("inf"))

    def strike(self, fault: Fault) -> None:
        if any(target == fault.target for target in (due.target for _, due in self._due)):
            return  # it is down already
        reached = self._tap.wait_for(fault.boundary, BOUNDARY_WAIT_S) if fault.boundary else True
        self._say(f"{fault}{'' if reached else ' (boundary not seen: now)'}")
        self.played += 1
        if fault.kind == "flush":
            self.pipe.valkey.flush_all()
            return
        process = self.pipe.processes().get(fault.target)
        if process is None:
            self.extra[fault.target]()
            return
        process.send(signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        self._due.append((time.monotonic() + fault.down_s, fault))

    def mend(self, now: float) -> None:
        for due in [entry for entry in self._due if entry[0] <= now]:
            self._due.remove(due)
            process = self.pipe.processes()[due[1].target]
            if due[1].kind == "kill":
                process.kill()  # reap
                process.start()
            else:
                process.resume()
        for name, process in self.pipe.processes().items():
            # a service that gave up by itself is started again, as its supervisor would
            if not process.running and name not in {due.target for _, due in self._due}:
                self._say(f"{name} had ended with {process.returncode}; started again")
                process.start()
