"""`python -m rollgrid_scorer`."""

from __future__ import annotations

import gc
import sys


def main() -> int:
    gc.disable()  # imports are kept for good: to look for garbage in them is a fifth of the start (`run_service` enables)
    from rollgrid_runtime.service import run_service

    from .service import ScorerService
    from .settings import ScorerSettings

    settings = ScorerSettings()
    return run_service(ScorerService(settings), settings)


if __name__ == "__main__":
    sys.exit(main())
