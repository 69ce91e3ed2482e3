"""The folder in which a container grows before it gets its name.

Knows paths, fsync and rename; not what is inside. Invariant: the output's name exists only for a container
that was complete and flushed when it got it; until then everything lies in `OUTPUT.partial`, on the same file
system.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from swiftlet_mlx.errors import NotResumable, OutputExists
from swiftlet_mlx.library import PARTIAL
from swiftlet_mlx.qpack import is_container, open_container
from swiftlet_mlx.whole import flush

from .disk import in_words, sync_folder
from .journal import Journal
from .places import STATE

MARGIN_BYTES = 64 << 20  # left free for the file system's own needs and for the small files


class Staging:
    """`OUTPUT.partial` and the journal inside it.

    Args:
        output: the container's final path.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self.folder = output.with_name(output.name + PARTIAL)
        self.state = self.folder / STATE

    def open(self, *, restart: bool = False) -> Journal:
        """Create or continue the folder and lock its journal.

        Raises:
            OutputExists: if the output's name is taken.
            NotResumable: if another process is at it, or the folder was begun by something else.
            InstallError: if the folder cannot be created.
        """
        self._refuse_taken()
        with in_words(self.folder):
            if restart and Journal.in_use(self.state / "journal"):
                raise NotResumable(f"{self.folder}: another process is installing here; wait for it or stop it")
            if restart:
                self._discard()
            elif self.folder.is_dir() and not self.state.is_dir() and any(self.folder.iterdir()):
                raise OutputExists(
                    f"{self.folder} holds something that this command did not begin; delete it, choose "
                    "another --output, or pass --restart to begin anew in its place"
                )
            new = not self.state.is_dir()
            self.state.mkdir(parents=True, exist_ok=True)
            journal = Journal.open(self.state / "journal")
            try:
                self._refuse_taken()  # who held the journal until now may have finished meanwhile
                if new:
                    for folder in (self.folder, self.output.parent):
                        sync_folder(folder)
            except BaseException:
                if not journal.identity:
                    self._discard()
                journal.close()
                raise
            return journal

    def _refuse_taken(self) -> None:
        if not (self.output.exists() or self.output.is_symlink()):
            return
        if not is_container(self.output):
            raise OutputExists(f"{self.output} exists and is not a container; choose another --output")
        # a kill right after the name was given leaves the working files inside
        shutil.rmtree(self.output / STATE, ignore_errors=True)
        raise OutputExists(
            f"{self.output} exists and is not overwritten. Choose another --output, or delete it first: "
            f"`swiftlet-mlx remove {self.output}`"
        )

    def seal(self) -> None:
        """Check that it opens, flush everything, give the container its name, drop the working files.

        The journal is to stay locked meanwhile: nobody else may begin in a folder that is about to move.

        Raises:
            ContainerError: if what was made does not open as a container.
            OutputExists: if the name was taken meanwhile.
        """
        open_container(self.folder)
        with in_words(self.folder):
            folders = {self.folder}
            for path in self.folder.rglob("*"):
                if self.state in (path, *path.parents):
                    continue
                if path.is_dir():
                    folders.add(path)
                else:
                    flush(path)
            for folder in folders:
                sync_folder(folder)
            if self.output.exists():
                raise OutputExists(f"{self.output} appeared meanwhile; the finished container is {self.folder}")
            os.rename(self.folder, self.output)
            sync_folder(self.output.parent)
            shutil.rmtree(self.output / STATE, ignore_errors=True)  # the container is complete in any case

    def discard(self) -> None:
        """Delete what was begun."""
        with in_words(self.folder):
            self._discard()

    def _discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=False) if self.folder.exists() else None


def free_bytes(folder: Path) -> int:
    """Bytes a file could still take on the file system that holds a folder, or will hold it."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def allocated_bytes(folder: Path) -> int:
    """Bytes the file system has given to the files under a folder; holes count nothing."""
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())
