"""Structured logs: one JSON object a line on stderr, with the ids of what is being worked on.

`with bound(tenant=…, group=…):` puts ids on every line that is logged inside, in the tasks started
there too.  Libraries' own lines have the same form; theirs begin at INFO, because their DEBUG shows
headers and bodies.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextvars import ContextVar, Token
from types import MappingProxyType, TracebackType
from typing import Any

import structlog

_IDS: ContextVar[Mapping[str, str]] = ContextVar("rollgrid_ids", default=MappingProxyType({}))


class bound:  # noqa: N801 - reads as the statement it is
    """Context manager: these ids are on every line logged inside.  None is left out.

    One context variable and no generator: it runs for each message of a service.
    """

    __slots__ = ("_ids", "_token")

    def __init__(self, **ids: str | None) -> None:
        self._ids = ids

    def __enter__(self) -> None:
        now = {**_IDS.get(), **{name: text for name, text in self._ids.items() if text is not None}}
        self._token: Token[Mapping[str, str]] = _IDS.set(now)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _IDS.reset(self._token)


def _with_ids(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    for name, text in _IDS.get().items():
        event.setdefault(name, text)
    return event


def configure_logging(service: str, level: str = "INFO", fmt: str = "json", instance: str | None = None) -> None:
    number = logging.getLevelNamesMapping()[level.upper()]
    renderer = structlog.processors.JSONRenderer() if fmt == "json" else structlog.dev.ConsoleRenderer()
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        _with_ids,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    foreign = logging.StreamHandler(sys.stderr)
    foreign.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(level=max(number, logging.INFO), handlers=[foreign])
    logging.getLogger("nats").setLevel(logging.ERROR)
    structlog.contextvars.bind_contextvars(service=service)
    if instance is not None:
        structlog.contextvars.bind_contextvars(instance=instance)


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(module=name)
    return logger
