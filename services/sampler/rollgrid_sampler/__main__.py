"""`python -m rollgrid_sampler`: one sampler on one engine, configured by `ROLLGRID_SAMPLER_…`."""

from __future__ import annotations

import sys

from rollgrid_runtime.imports import nothing_collected


def main() -> int:
    with nothing_collected():
        from rollgrid_runtime.service import run_service

        from .service import SamplerService
        from .settings import SamplerSettings, redis_if_named

    settings = SamplerSettings()
    return run_service(SamplerService(settings, redis=redis_if_named()), settings)


if __name__ == "__main__":
    sys.exit(main())
