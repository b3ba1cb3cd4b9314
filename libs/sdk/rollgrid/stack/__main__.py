"""`python -m rollgrid.stack HOME`: the supervisor in the background, configured by HOME/conf/stack-config.json."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from rollgrid.errors import ConfigurationError, RollgridError

from .config import StackConfig
from .home import Home, read_json
from .supervisor import Supervisor


def main() -> int:
    home = Home(Path(sys.argv[1]))
    config = read_json(home.config_file, StackConfig)
    try:
        if config is None:
            raise ConfigurationError(f"{home.config_file} is missing or damaged")
        asyncio.run(_run(home, config))
    except RollgridError as error:
        sys.stderr.write(f"rollgrid: {error}\n")
        return 1
    return 0


async def _run(home: Home, config: StackConfig) -> None:
    await Supervisor(home, config).run()


if __name__ == "__main__":
    sys.exit(main())
