"""The caller's trace context, for the header of what it submits.

No dependency: whoever has a current OpenTelemetry span has imported its API already.
"""

from __future__ import annotations

import os
import sys

ENVIRONMENT = "TRACEPARENT"
"""How a program that is traced hands its context to a command it starts."""


def traceparent() -> str | None:
    """Of the current OpenTelemetry span, else $TRACEPARENT, else None."""
    api = sys.modules.get("opentelemetry.trace")
    if api is not None:
        context = api.get_current_span().get_span_context()
        if context.is_valid:
            return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
    return os.environ.get(ENVIRONMENT) or None
