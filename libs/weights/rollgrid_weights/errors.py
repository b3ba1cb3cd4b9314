"""Failures of this library: the codes of the contracts, without the services' runtime."""

from __future__ import annotations

from rollgrid_contracts.failures import Boundary, ErrorCode, ErrorInfo


class WeightsError(Exception):
    """A refused file, manifest or version.  `field` names the offending file or tensor, `limit` the bound it broke."""

    def __init__(self, code: ErrorCode, message: str, *, field: str | None = None, limit: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.limit = limit

    def info(self) -> ErrorInfo:
        return ErrorInfo(
            code=self.code, message=self.message, boundary=Boundary.WEIGHTS, field=self.field, limit=self.limit
        )


def invalid(message: str, field: str | None = None) -> WeightsError:
    """The usual refusal: what was published is not what it has to be."""
    return WeightsError(ErrorCode.INVALID_REQUEST, message, field=field)
