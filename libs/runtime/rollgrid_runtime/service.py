"""The life of a service: start, run, drain on SIGTERM, stop.  A second signal ends it at once."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator
from typing import Any, Protocol

from prometheus_client import Histogram, disable_created_metrics

from . import telemetry
from .blobs import Blobs
from .bus import Bus
from .errors import RollgridError
from .health import HealthApp, http_server
from .logging import configure_logging, get_logger
from .provision import provision
from .settings import NatsSettings, S3Settings, ServiceSettings, TraceSettings

log = get_logger(__name__)
LOOP_LAG_PERIOD_S = 0.25
LOOP_LAG = Histogram(
    "rollgrid_process_loop_lag_seconds",
    "How late the event loop runs what is due",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)


class Service(Protocol):
    """What every service is to its process.

    `run` works until it is cancelled or fails; it is started in a task after `start`.  `drain`
    stops taking work and ends what is held, within `ServiceSettings.drain_s`; then `run` is cancelled.
    """

    name: str

    async def start(self) -> None: ...
    async def run(self) -> None: ...
    async def drain(self) -> None: ...
    async def stop(self) -> None: ...
    async def problems(self) -> dict[str, str]: ...
    def facts(self) -> dict[str, Any]: ...


def instance_name(settings: ServiceSettings, service: str) -> str:
    """The process's own name: from settings, else service-host-pid-random."""
    if settings.instance:
        return settings.instance
    return f"{service}-{socket.gethostname().split('.')[0].lower()}-{os.getpid()}-{secrets.token_hex(2)}"


@contextlib.asynccontextmanager
async def connections(
    name: str, nats: NatsSettings | None = None, s3: S3Settings | None = None
) -> AsyncIterator[tuple[Bus, Blobs]]:
    """A provisioned bus and the bucket, closed at the end.  Raises BusError, StorageError."""
    blobs = Blobs(s3 or S3Settings())
    try:
        await blobs.ensure_bucket()
        bus = await Bus.connect(nats or NatsSettings(), name, blobs)
        try:
            await provision(bus)
            yield bus, blobs
        finally:
            await bus.close()
    finally:
        blobs.close()


def run_service(service: Service, settings: ServiceSettings) -> int:
    """Run to the end; the process's exit code (0 after a drain, 1 after a failure)."""
    gc.freeze()  # what was imported
    configure_logging(service.name, settings.log_level, settings.log_format, settings.instance)
    _begin_traces(service.name, settings)
    disable_created_metrics()  # a third of all series, and nobody reads them
    try:
        import uvloop

        runner: Any = uvloop.run
    except ImportError:
        runner = asyncio.run
    return int(runner(_serve(service, settings)))


async def _serve(service: Service, settings: ServiceSettings) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, _on_signal, stop, service.name)
    try:
        await service.start()
        spare_collector()
    except RollgridError as error:
        log.error("start_failed", code=error.code, error=error.message)
        return 1
    code = 0
    try:
        async with http_server(HealthApp(service.problems, service.facts), settings.health_host, settings.health_port):
            log.info("started")
            code = await _until_stopped(service, settings, stop)
    finally:
        await service.stop()
        await _end_traces()
        log.info("stopped", code=code)
    return code


def _begin_traces(name: str, settings: ServiceSettings) -> None:
    """Record spans if the environment names a place for them; a place that cannot be used costs the traces alone."""
    traces = TraceSettings()
    if not (traces.otlp_endpoint or traces.otlp_traces_endpoint or traces.file):
        return
    from .tracing import recorder_of

    try:
        recorder = recorder_of(name, instance_name(settings, name), traces)
    except (OSError, ValueError) as error:
        log.error("traces_off", error=str(error))
        return
    if recorder is not None:
        telemetry.enable(recorder, traces.ratio)


async def _end_traces() -> None:
    recorder = telemetry.disable()
    if recorder is not None and not await asyncio.to_thread(recorder.close):
        log.warning("spans_given_up")


async def _probe_loop() -> None:
    """Observe how late a timer fires: whatever blocks the loop shows here."""
    while True:
        due = time.monotonic() + LOOP_LAG_PERIOD_S
        await asyncio.sleep(LOOP_LAG_PERIOD_S)
        LOOP_LAG.observe(max(0.0, time.monotonic() - due))


async def _until_stopped(service: Service, settings: ServiceSettings, stop: asyncio.Event) -> int:
    work = asyncio.create_task(service.run())
    stopping = asyncio.create_task(stop.wait())
    probe = asyncio.create_task(_probe_loop())
    await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
    code = 0
    if not work.done():
        log.info("draining")
        try:
            async with asyncio.timeout(settings.drain_s):
                await service.drain()
        except TimeoutError:
            log.warning("drain_timed_out", drain_s=settings.drain_s)
        work.cancel()
    stopping.cancel()
    probe.cancel()
    try:
        await work
    except asyncio.CancelledError:
        pass
    except BaseException:
        log.exception("run_failed")
        code = 1
    return code


def spare_collector() -> None:
    """What a service has built by now lives as long as it does: the garbage collector need not visit it again."""
    gc.collect()
    gc.freeze()


def _on_signal(stop: asyncio.Event, name: str) -> None:
    if stop.is_set():
        log.warning("second_signal")
        os._exit(130)
    stop.set()
