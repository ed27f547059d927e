"""Large blobs of the SQLite store as files, each named by its hash in a folder of its first two letters."""

import os
from pathlib import Path


class BlobFiles:
    """The files below `folder`: `blobs`, and `damaged` for those that were set apart. All methods raise OSError."""

    def __init__(self, folder: Path) -> None:
        self._blobs, self._damaged = folder / "blobs", folder / "damaged"
        self._blobs.mkdir(parents=True, exist_ok=True, mode=0o700)

    def begin(self) -> set[str]:
        """Remove what an interrupted write has left. Return the hashes of all files."""
        found = set()
        for file in self._blobs.glob("??/*"):
            if file.suffix:
                file.unlink(missing_ok=True)
            else:
                found.add(file.name)
        return found

    def read(self, sha256: str) -> bytes:
        """Nothing if the file is missing."""
        try:
            return self._path(sha256).read_bytes()
        except FileNotFoundError:
            return b""

    def write(self, sha256: str, blob: bytes) -> None:
        """Return when the file survives power loss: temporary file, fdatasync, rename, fsync of the folders."""
        path = self._path(sha256)
        if path.exists():
            return
        path.parent.mkdir(exist_ok=True, mode=0o700)
        part = path.with_suffix(f".{os.getpid()}.part")
        with part.open("wb") as file:
            file.write(blob)
            file.flush()
            os.fdatasync(file.fileno())
        part.replace(path)
        for folder in (path.parent, self._blobs):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def remove(self, sha256: str) -> None:
        self._path(sha256).unlink(missing_ok=True)

    def set_apart(self, sha256: str) -> None:
        """Keep a damaged file for analysis."""
        if (file := self._path(sha256)).exists():
            self._damaged.mkdir(exist_ok=True, mode=0o700)
            file.replace(self._damaged / file.name)

    def _path(self, sha256: str) -> Path:
        return self._blobs / sha256[:2] / sha256
