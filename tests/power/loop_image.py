"""A file system inside a file.  Copying the file copies what a disk would hold at a power cut.

What processes wrote and did not flush is in the page cache of the inner file system, which the
image does not show: it is mounted so that nothing but a flush writes its journal (`commit=`).  What
had reached the device unflushed does survive: the device is modelled without a cache of its own.
It needs root and loop devices.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.servers import scratch
from tests.support.waiting import wait_until

OPTIONS = "loop,commit=600,noinit_itable,noatime"
CHUNK = 4 * 2**20
COPIES = 5


class TornCopy(RuntimeError):
    """The image kept changing while it was copied, so no copy is what a disk held at one moment."""


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
    except (subprocess.SubprocessError, OSError) as error:
        return f"loop images cannot be mounted here: {getattr(error, 'stderr', None) or error}"
    return None


class LoopDisk:
    """An ext4 image mounted at `mount_point`; `copy` and `mount_copy` swap it for what a cut leaves."""

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
        """Nothing stays mounted, whatever still holds a file there."""
        try:
            self.unmount()
        except TimeoutError:
            _run("umount", "-l", str(self.mount_point))
            raise

    def copy(self) -> None:
        """What the disk holds at one moment; every writer must be stopped (SIGSTOP) meanwhile.

        The kernel is not stopped.  A copy counts when, read again, the image still equals it: every
        block then was as copied at the moment between the two readings.  Raises TornCopy.
        """
        copied = self.folder / "b.img"
        for _ in range(COPIES):
            _run("cp", "--sparse=always", str(self._image), str(copied))
            if same_bytes(self._image, copied):
                return
            time.sleep(0.2)  # the kernel is writing back; it has nothing new to write
        raise TornCopy(f"{self._image} changed during each of {COPIES} copies")

    def mount_copy(self) -> None:
        """After `copy`, and after every process has left the disk: the power is back."""
        self.unmount()
        self._image.unlink()
        self._image = self.folder / "b.img"
        self._mount()

    def _mount(self) -> None:
        _run("mount", "-o", OPTIONS, str(self._image), str(self.mount_point))
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


def same_bytes(one: Path, other: Path) -> bool:
    """Whether two sparse files of equal length hold the same; what is a hole in both is not read."""
    with one.open("rb") as first, other.open("rb") as second:
        length = os.fstat(first.fileno()).st_size
        if os.fstat(second.fileno()).st_size != length:
            return False
        for start, end in sorted({*_extents(first.fileno(), length), *_extents(second.fileno(), length)}):
            for offset in range(start, end, CHUNK):
                size = min(CHUNK, end - offset)
                if os.pread(first.fileno(), size, offset) != os.pread(second.fileno(), size, offset):
                    return False
    return True


def _extents(file: int, length: int) -> Iterator[tuple[int, int]]:
    """[start, end) of every stretch that is no hole."""
    end = 0
    while end < length:
        try:
            start = os.lseek(file, end, os.SEEK_DATA)
        except OSError:  # ENXIO: holes up to the end
            return
        end = os.lseek(file, start, os.SEEK_HOLE)
        yield start, end


def _run(*argv: str) -> None:
    try:
        subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60)
    except subprocess.CalledProcessError as error:
        error.add_note(str(error.stderr))
        raise
