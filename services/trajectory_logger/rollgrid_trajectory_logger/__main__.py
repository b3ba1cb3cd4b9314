"""`python -m rollgrid_trajectory_logger`."""

from __future__ import annotations

import sys

from rollgrid_runtime.imports import nothing_collected


def main() -> int:
    with nothing_collected():
        from rollgrid_runtime.service import run_service

        from .service import TrajectoryLogger
        from .settings import TrajectoryLoggerSettings

    settings = TrajectoryLoggerSettings()
    return run_service(TrajectoryLogger(settings), settings)


if __name__ == "__main__":
    sys.exit(main())
