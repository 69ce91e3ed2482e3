"""What an unfinished installation has done, on disk, so that a kill at any moment costs at most what was not
recorded.

Knows lines of JSON with a checksum each, one lock, `fsync` and the system's boot id; not what the names in it mean.
Two kinds of record: `done` for bytes that were flushed, which holds after a power cut, and `wrote` for bytes that the
system has but may not have flushed, which holds only until the machine is started again. Invariants: a `done`
line is on disk before the call that writes it returns; a line that was cut short or damaged is dropped with all that
follows it, never guessed at; two processes cannot hold one journal.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import threading
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from swiftlet_mlx.errors import InstallError, NotResumable

from .disk import in_words, sync_folder
from .extents import Extents

FORMAT = 2
MAX_JOURNAL_BYTES = 256_000_000  # a flush is recorded about every second at most: years of downloading fit


class Journal:
    """The record of one installation: who it is (`identity`) and which bytes of which source file are in
    place.

    Use `Journal.open`; it is a context manager and holds an exclusive lock until closed. Methods may be
    called from several threads.
    """

    def __init__(self, fd: int, path: Path) -> None:
        self._fd, self.path = fd, path
        self._lock = threading.Lock()
        self._size = 0
        self._boot = boot_id()
        self._boot_written = False
        self.identity: dict[str, Any] = {}
        self.extents: dict[str, Extents] = {}
        self.verified: dict[str, str] = {}
        self.notes: dict[str, Any] = {}

    @classmethod
    def open(cls, path: Path) -> Journal:
        """Open or create the journal at `path` and lock it.

        Raises:
            NotResumable: if another process holds it, or it was written by another version.
            InstallError: if the file system refuses, locks included.
        """
        new = not path.exists()
        with in_words(path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        journal = cls(fd, path)
        try:
            _lock(fd, path)
            with in_words(path):
                journal._load()
                if new:
                    sync_folder(path.parent)
        except BaseException:
            journal.close()
            raise
        return journal

    @staticmethod
    def in_use(path: Path) -> bool:
        """Whether a process holds the journal at `path`."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
        return False

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock. Recording afterwards is an error."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def begin(self, identity: Mapping[str, Any]) -> bool:
        """State what is being installed; on a journal that has begun before, check that it is the same thing.

        Args:
            identity: JSON values by name; every name is compared.

        Returns:
            True if this continues earlier work.

        Raises:
            NotResumable: naming the first entry that differs, with both values.
        """
        wanted = json.loads(json.dumps(dict(identity)))
        if not self.identity:
            self._append({"format": FORMAT, "identity": wanted})
            self.identity = wanted
            return False
        for key in [*wanted, *self.identity]:
            before, now = self.identity.get(key), wanted.get(key)
            if before != now:
                what, before, now = _first_difference(key, before, now)
                raise NotResumable(
                    f"{self.path.parent}: an unfinished installation lies here with {what} {before!r}, this "
                    f"one has {now!r}. Repeat the earlier command, choose another --output, or pass "
                    "--restart to begin anew"
                )
        return True

    def wrote(self, name: str, start: int, stop: int) -> None:
        """Record that bytes `[start, stop)` of source file `name` were handed to the system, flushed or
        not."""
        with self._lock:
            if not self._boot_written:
                self._append({"boot": self._boot}, flush=False)
                self._boot_written = True
            self._append({"wrote": [name, start, stop]}, flush=False)
            self.extents.setdefault(name, Extents()).add(start, stop)

    def done(self, *ranges: tuple[str, int, int]) -> None:
        """Record that `(name, start, stop)` of source files are in place. Flush those bytes before calling
        this."""
        with self._lock:
            for name, start, stop in ranges:
                self._append({"done": [name, start, stop]}, flush=False)
                self.extents.setdefault(name, Extents()).add(start, stop)
            with in_words(self.path):
                os.fsync(self._fd)

    def mark_verified(self, name: str, digest: str) -> None:
        """Record that all bytes in place for `name` were read back and have this hash."""
        with self._lock:
            self._append({"verified": [name, digest]})
            self.verified[name] = digest

    def note(self, key: str, value: Any) -> None:
        """Record one JSON value by name; a later note of the same name replaces it."""
        with self._lock:
            self._append({"note": [key, value]})
            self.notes[key] = value

    def done_bytes(self) -> int:
        """Bytes recorded as in place, over all files."""
        with self._lock:
            return sum(extents.nbytes for extents in self.extents.values())

    def covered_to(self, name: str, start: int) -> int:
        """Where the unbroken run of recorded bytes of `name` from `start` ends."""
        with self._lock:
            return self.extents[name].covered_to(start) if name in self.extents else start

    def missing(self, name: str, size: int) -> list[tuple[int, int]]:
        """The intervals of `[0, size)` of `name` that are not recorded, in order."""
        with self._lock:
            return list(self.extents.get(name, Extents()).missing(0, size))

    def _append(self, entry: dict[str, Any], *, flush: bool = True) -> None:
        text = json.dumps(entry, separators=(",", ":")).encode()
        view, at = memoryview(b"%b %b\n" % (text, _checksum(text))), self._size
        with in_words(self.path):
            while view:
                written = os.pwrite(self._fd, view, at)
                view, at = view[written:], at + written
            if flush:
                os.fsync(self._fd)
        self._size = at

    def _load(self) -> None:
        size = os.fstat(self._fd).st_size
        if size > MAX_JOURNAL_BYTES:
            raise NotResumable(f"{self.path}: {size} bytes are too many for a journal; pass --restart to begin anew")
        text = os.pread(self._fd, size, 0)
        boot = None
        for line in _whole_lines(text):
            told, _, checksum = line[:-1].rpartition(b" ")
            if checksum != _checksum(told):
                if not self._size:
                    _refuse_other_format(line, self.path)
                break
            try:
                entry = json.loads(told)
                boot = entry.get("boot", boot)
                self._replay(entry, trusted=boot is not None and boot == self._boot)
            except (ValueError, TypeError, KeyError, AttributeError):
                break
            self._size += len(line)
        if self._size != size:
            os.ftruncate(self._fd, self._size)

    def _replay(self, entry: dict[str, Any], *, trusted: bool) -> None:
        if "identity" in entry:
            if entry["format"] != FORMAT:
                raise _other_format(self.path, entry["format"])
            self.identity = dict(entry["identity"])
        elif "done" in entry or "wrote" in entry:
            name, start, stop = entry.get("done") or entry["wrote"]
            if not 0 <= start <= stop:
                raise ValueError("not an interval")
            if "done" in entry or trusted:
                self.extents.setdefault(str(name), Extents()).add(start, stop)
        elif "verified" in entry:
            name, digest = entry["verified"]
            self.verified[str(name)] = str(digest)
        elif "note" in entry:
            key, value = entry["note"]
            self.notes[str(key)] = value
        elif "boot" not in entry:
            raise ValueError("unknown entry")


def boot_id() -> str | None:
    """A name for the time since this machine was started; None where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        pass
    try:  # macOS
        told = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return told.stdout.strip() or None


def _lock(fd: int, path: Path) -> None:
    """Lock an opened journal, or say why not."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pass
    except OSError as error:
        raise InstallError(
            f"{path.parent}: this file system cannot lock files ({error.strerror}), so two installations could meet "
            "here; choose another --output"
        ) from None
    else:
        try:
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return
        except OSError:
            pass  # who held it has finished, or was told to --restart: this is no longer the journal of this name
    raise NotResumable(f"{path.parent}: another process is installing here; wait for it or stop it")


def _checksum(text: bytes) -> bytes:
    return b"%08x" % zlib.crc32(text)


def _refuse_other_format(line: bytes, path: Path) -> None:
    """Tell a first line that another version wrote, which may have no checksum, from a damaged one."""
    try:
        found = json.loads(line)["format"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return
    if found != FORMAT:
        raise _other_format(path, found)


def _other_format(path: Path, found: Any) -> NotResumable:
    return NotResumable(
        f"{path}: written by another version (format {found!r}, this one knows {FORMAT}); finish with that version "
        "or pass --restart to begin anew"
    )


def _whole_lines(text: bytes) -> Iterator[bytes]:
    return (line for line in text.splitlines(keepends=True) if line.endswith(b"\n"))


def _first_difference(key: str, before: Any, now: Any) -> tuple[str, Any, Any]:
    """Descend into dictionaries to the entry that differs, so that a message names a file or an option, not a
    table."""
    while isinstance(before, dict) and isinstance(now, dict):
        inner = next(k for k in [*now, *before] if before.get(k) != now.get(k))
        key, before, now = f"{key} {inner}", before.get(inner), now.get(inner)
    return key, before, now
