"""`python -m rollgrid_scorer`."""

from __future__ import annotations

import sys

from rollgrid_runtime.imports import nothing_collected


def main() -> int:
    with nothing_collected():
        from rollgrid_runtime.service import run_service

        from .service import ScorerService
        from .settings import ScorerSettings

    settings = ScorerSettings()
    return run_service(ScorerService(settings), settings)


if __name__ == "__main__":
    sys.exit(main())
