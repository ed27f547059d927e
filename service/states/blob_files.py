"""Stores large blobs of the SQLite store as files. A file's name is the blob's hash, and its folder's name is the hash's first two letters.

Files of earlier releases have a record of their state after the blob, which nothing reads.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path


class BlobFiles:
    """The files of blobs in `folder`: valid ones in the subfolder `blobs`, damaged ones in `damaged`. All methods may raise OSError."""

    def __init__(self, folder: Path) -> None:
        self._blobs, self._damaged = folder / "blobs", folder / "damaged"
        self._blobs.mkdir(parents=True, exist_ok=True, mode=0o700)

    def all(self) -> Iterator[str]:
        """Return the hashes of all files in `blobs`."""
        return (file.name for file in self._blobs.glob("??/*") if not file.suffix)

    def begin(self) -> set[str]:
        """Remove the temporary files of interrupted writes. Return the hashes of all files in `blobs`."""
        for file in self._blobs.glob("??/*.part"):
            file.unlink(missing_ok=True)
        return set(self.all())

    def read(self, sha256: str, size: int) -> bytes:
        """Return the first `size` bytes of a file: fewer bytes if the file is truncated, b"" if it is missing."""
        try:
            with self._path(sha256).open("rb") as file:
                return file.read(size)
        except FileNotFoundError:
            return b""

    def has(self, sha256: str, size: int) -> bool:
        """Return whether there is a file with this hash and at least `size` bytes."""
        try:
            return self._path(sha256).stat().st_size >= size
        except FileNotFoundError:
            return False

    def write(self, sha256: str, blob: bytes) -> None:
        """Write a file, which survives power loss after this call: temporary file, fdatasync, rename, fsync of the folders."""
        path = self._path(sha256)
        if path.exists():
            return
        path.parent.mkdir(exist_ok=True, mode=0o700)
        part = path.with_suffix(f".{os.getpid()}.part")
        try:
            with part.open("wb") as file:
                file.write(blob)
                file.flush()
                os.fdatasync(file.fileno())
        except OSError:
            part.unlink()  # on a full disk it would hold the last room
            raise
        part.replace(path)
        for folder in (path.parent, self._blobs):
            sync(folder)

    def copy(self, sha256: str, to: "BlobFiles") -> bool:
        """Copy the blob's file to the folder of `to`, unless that folder has it already. Returns False if it is in neither folder."""
        source, target = self._path(sha256), to._path(sha256)
        if target.exists():
            return True
        target.parent.mkdir(exist_ok=True, mode=0o700)
        part = target.with_suffix(f".{os.getpid()}.part")
        try:
            shutil.copyfile(source, part)
        except FileNotFoundError:
            return False
        sync(part)
        part.replace(target)
        sync(target.parent)
        return True

    def remove(self, sha256: str) -> None:
        self._path(sha256).unlink(missing_ok=True)

    def set_apart(self, sha256: str) -> None:
        """Move a damaged file to the folder `damaged`, for analysis."""
        if (file := self._path(sha256)).exists():
            self._damaged.mkdir(exist_ok=True, mode=0o700)
            file.replace(self._damaged / file.name)

    def _path(self, sha256: str) -> Path:
        return self._blobs / sha256[:2] / sha256


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk, so that they survive power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
