"""A file system inside a file.  Copying the file copies what a disk would hold at a power cut.

What processes wrote and did not flush is in the page cache of the inner file system, which the
image does not show.  It needs root and loop devices.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.servers import scratch
from tests.support.waiting import wait_until


def unavailable() -> str | None:
    """Why no image can be mounted here; None when one can."""
    if os.geteuid() != 0:
        return "mounting a loop image needs root"
    for program in ("mkfs.ext4", "mount", "umount", "truncate"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    try:
        with scratch("loop-probe") as folder, LoopDisk(folder, 16) as disk:
            (disk.mount_point / "probe").write_text("x")
    except (subprocess.CalledProcessError, OSError) as error:
        return f"loop images cannot be mounted here: {getattr(error, 'stderr', None) or error}"
    return None


class LoopDisk:
    """An ext4 image mounted at `mount_point`.  `cut` swaps it for a copy made at this moment."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        self.folder, self.megabytes = folder, megabytes
        self.mount_point = folder / "disk"
        self._image = folder / "a.img"
        self._mounted = False

    def __enter__(self) -> LoopDisk:
        self.mount_point.mkdir(parents=True)
        _run("truncate", "-s", f"{self.megabytes}M", str(self._image))
        _run("mkfs.ext4", "-q", "-F", str(self._image))
        self._mount()
        return self

    def __exit__(self, *_: object) -> None:
        self.unmount()

    def copy(self) -> None:
        """What the disk holds now; every writer must be stopped (SIGSTOP) meanwhile."""
        _run("cp", "--sparse=always", str(self._image), str(self.folder / "b.img"))

    def mount_copy(self) -> None:
        """After `copy`, and after every process has left the disk: the power is back."""
        self.unmount()
        self._image = self.folder / "b.img"
        self._mount()

    def _mount(self) -> None:
        _run("mount", "-o", "loop", str(self._image), str(self.mount_point))
        self._mounted = True

    def unmount(self) -> None:
        if not self._mounted:
            return

        def gone() -> bool:
            with contextlib.suppress(subprocess.CalledProcessError):
                _run("umount", str(self.mount_point))
                return True
            return False

        wait_until(gone, 10, "umount of the loop image", every_s=0.1)  # a killed process may still be ending
        self._mounted = False


@contextlib.contextmanager
def loop_disk(megabytes: int) -> Iterator[LoopDisk]:
    with scratch("power") as folder, LoopDisk(folder, megabytes) as disk:
        yield disk


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60)
