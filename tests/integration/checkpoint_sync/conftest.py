"""The ledger's driver, for what garbage collection asks the ledger."""

from __future__ import annotations

from tests.integration.trajectory_logger.conftest import driver

__all__ = ["driver"]
