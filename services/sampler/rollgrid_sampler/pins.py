"""Versions that some batch or episode needs: those with a pin in `rg_pins` that is not over.

Pins are written and dropped elsewhere; here they only say which LoRA versions are worth keeping loaded.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection

from rollgrid_contracts.checkpoints import Pin
from rollgrid_contracts.topology import PINS
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.kv import Table


class Pins:
    """Of one policy.  All methods raise BusError."""

    def __init__(self, bus: Bus, tenant: str, policy: str) -> None:
        self._table: Table[Pin] = Table(bus, PINS, Pin)
        self._prefix = f"{tenant}.{policy}."

    def subject(self) -> str:
        """On which every change of them is heard."""
        return f"$KV.{PINS.name}.{self._prefix}>"

    async def holds(self, version: int, holder: str) -> bool:
        """Whether this batch or session holds a pin on the version."""
        return await self._any_holds([f"{self._prefix}{version}.{holder}"])

    async def asked(self, versions: Collection[int]) -> frozenset[int]:
        """Those of `versions` that somebody holds a pin on."""
        holders: dict[int, list[str]] = defaultdict(list)
        for key in await self._table.keys(f"{self._prefix}>"):
            version = key.removeprefix(self._prefix).partition(".")[0]
            if version.isdigit() and int(version) in versions:
                holders[int(version)].append(key)
        return frozenset([version for version, keys in holders.items() if await self._any_holds(keys)])

    async def _any_holds(self, keys: list[str]) -> bool:
        for key in keys:
            found = await self._table.get(key)
            if found is not None and found.value.until > time.time():
                return True
        return False
