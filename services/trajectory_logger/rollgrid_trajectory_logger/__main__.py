"""`python -m rollgrid_trajectory_logger`."""

from __future__ import annotations

import gc
import sys


def main() -> int:
    gc.disable()  # imports are kept for good: to look for garbage in them is a fifth of the start (`run_service` enables)
    from rollgrid_runtime.service import run_service

    from .service import TrajectoryLogger
    from .settings import TrajectoryLoggerSettings

    settings = TrajectoryLoggerSettings()
    return run_service(TrajectoryLogger(settings), settings)


if __name__ == "__main__":
    sys.exit(main())
