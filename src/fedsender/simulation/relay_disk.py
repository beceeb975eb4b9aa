"""A disk in memory that may lose power between any two steps, and what a test says about it.

Files and directories are two things each: what a running process sees, and what is durable. A
crash keeps of what was not synced what it likes: of a file's new bytes a part, with holes of zeros
in it, of a directory's changes the first few. Every step that changes something is counted and can
be made to fail, or to be the last one.
"""

import errno
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fedsender.relay.disk import File, Space

_SECTOR = 512


class PowerCut(BaseException):
    """The machine is off; no code of ours may go on."""


@dataclass(eq=False)
class _Inode:
    content: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    locked: bool = False


@dataclass(eq=False)
class _Folder:
    entries: "dict[str, _Inode | _Folder]" = field(default_factory=dict)
    durable: "dict[str, _Inode | _Folder]" = field(default_factory=dict)
    # What `entries` was after each change since the last sync.
    history: "list[dict[str, _Inode | _Folder]]" = field(default_factory=list)
    # Files that were removed since.
    removed: "dict[str, _Inode]" = field(default_factory=dict)

    def change(self, name: str, node: "_Inode | _Folder | None") -> None:
        self.entries = {**self.entries}
        if node is None:
            del self.entries[name]
        else:
            self.entries[name] = node
        self.history.append(self.entries)


class MemoryFile:
    """An open file of a `MemoryDisk`."""

    def __init__(self, disk: "MemoryDisk", inode: _Inode, *, write: bool) -> None:
        self._disk = disk
        self._inode = inode
        self._write = write
        self._boot = disk.boots

    def _check(self, *, write: bool = False) -> None:
        if self._boot != self._disk.boots:
            raise PowerCut("a file of before the crash")
        if write and not self._write:
            raise OSError(errno.EBADF, "not open for writing")

    def append(self, data: bytes) -> None:
        self._check(write=True)
        room = self._disk.room()
        self._disk.step(
            "append", partly=lambda part: self._inode.content.extend(data[: int(len(data) * part)])
        )
        self._inode.content.extend(data[: max(0, room)])
        if len(data) > room:
            raise OSError(errno.ENOSPC, "No space left on device")

    def pread(self, size: int, offset: int) -> bytes:
        self._check()
        self._disk.reads += 1
        return bytes(self._inode.content[offset : offset + size])

    def size(self) -> int:
        self._check()
        return len(self._inode.content)

    def truncate(self, size: int) -> None:
        self._check(write=True)
        self._disk.step("truncate")
        del self._inode.content[size:]

    def fsync(self) -> None:
        self._check()
        self._disk.step("fsync")
        self._inode.durable = bytes(self._inode.content)

    def close(self) -> None:
        if self._boot == self._disk.boots and self._inode.locked and self._write:
            self._inode.locked = False


class MemoryDisk:
    """See the module.

    Attributes:
        capacity: bytes of all files together, at most.
        fail: step number -> the errno with which it fails, half done.
        cut_at: the step at which power goes; None: never.
        steps, reads: how many there were.
        log: the word for each step.
        on_step: told of each step before it is done.
        on_remove: told of each path before it is removed.
    """

    def __init__(self, seed: int = 0, capacity: int = 2**40) -> None:
        self.random = random.Random(seed)
        self.capacity = capacity
        self.fail: dict[int, int] = {}
        self.cut_at: int | None = None
        self.steps = 0
        self.reads = 0
        self.boots = 0
        self.log: list[str] = []
        self.on_step: Callable[[str], None] | None = None
        self.on_remove: Callable[[Path], None] | None = None
        self._off = False
        self._root = _Folder()

    # --- what a test does -------------------------------------------------------------------------

    def step(self, word: str, partly: Callable[[float], None] | None = None) -> None:
        """Something is changed: count it, and see whether it goes wrong."""
        if self._off:
            raise PowerCut("the power is off")
        number = self.steps
        self.steps += 1
        self.log.append(word)
        if self.on_step is not None:
            self.on_step(word)
        broken = self.fail.pop(number, None)
        if number == self.cut_at or broken is not None:
            if partly is not None:
                partly(self.random.random())
            if broken is not None:
                raise OSError(broken, "injected")
            self._off = True
            raise PowerCut(f"step {number}: {word}")

    def crash(self, *, power: bool = True) -> None:
        """The machine loses power; or only the process is killed, and what it wrote stays."""
        self.boots += 1
        self.cut_at = None
        self._off = False
        self.fail = {}
        self._revive(self._root, power)

    def _revive(self, folder: _Folder, power: bool) -> None:
        if power:
            states = [folder.durable, *folder.history]
            folder.entries = {**self.random.choice(states)}
            for name, removed in folder.removed.items():
                # Each by itself: nothing says in which order removals last.
                if self.random.random() < 0.4:
                    folder.entries.setdefault(name, removed)
        folder.durable = folder.entries
        folder.history, folder.removed = [], {}
        for node in folder.entries.values():
            if isinstance(node, _Folder):
                self._revive(node, power)
                continue
            node.locked = False
            if power:
                node.content = bytearray(self._survives(node))
            # The next crash does not take it away again.
            node.durable = bytes(node.content)

    def _survives(self, inode: _Inode) -> bytes:
        durable, seen = inode.durable, bytes(inode.content)
        if not seen.startswith(durable):
            return self.random.choice((durable, seen))
        new = bytearray(seen[len(durable) :])
        how = self.random.choice(("nothing", "all", "part", "holes"))
        if how == "nothing":
            return durable
        if how != "all":
            del new[self.random.randint(0, len(new)) :]
        if how == "holes":
            first = -len(durable) % _SECTOR
            for begin in [0, *range(first, len(new), _SECTOR)]:
                end = min(len(new), begin + _SECTOR if begin else max(first, 1))
                if self.random.random() < 0.4:
                    new[begin:end] = bytes(end - begin)
        return durable + new

    def content(self, path: Path) -> bytearray:
        """The bytes of a file, to be spoiled; they are durable at once with `settle`."""
        node = self._find(path)
        assert isinstance(node, _Inode)
        return node.content

    def durable(self, directory: Path) -> list[bytes]:
        """What would be left of a directory's files if power went now, at the least."""
        nodes = self._folder(directory).durable.values()
        return [node.durable for node in nodes if isinstance(node, _Inode)]

    def settle(self) -> None:
        """All that is there is durable."""
        self.crash(power=False)

    def flip_bit(self, path: Path, bit: int) -> Callable[[], None]:
        """Spoil one bit of a file, on the platter too; what is returned puts it right again."""
        node = self._find(path)
        assert isinstance(node, _Inode)

        def flip() -> None:
            at, mask = bit // 8, 1 << bit % 8
            if at < len(node.content):
                node.content[at] ^= mask
            if at < len(node.durable):
                durable = bytearray(node.durable)
                durable[at] ^= mask
                node.durable = bytes(durable)

        flip()
        return flip

    def durable_files(self, directory: Path) -> dict[str, bytes]:
        """The files of a directory that would be left if power went now, at the least."""
        folder: _Folder = self._root
        for part in directory.parts[1:]:
            node = folder.durable.get(part)
            if not isinstance(node, _Folder):
                return {}
            folder = node
        files = folder.durable.items()
        return {name: node.durable for name, node in files if isinstance(node, _Inode)}

    def room(self) -> int:
        """Bytes that may still be written."""
        return self.capacity - self._used(self._root)

    def _used(self, folder: _Folder) -> int:
        return sum(
            self._used(node) if isinstance(node, _Folder) else len(node.content)
            for node in folder.entries.values()
        )

    # --- what the code under test does ------------------------------------------------------------

    def _find(self, path: Path) -> _Inode | _Folder:
        node: _Inode | _Folder = self._root
        for part in path.parts[1:]:
            if not isinstance(node, _Folder) or part not in node.entries:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
            node = node.entries[part]
        return node

    def _folder(self, path: Path) -> _Folder:
        node = self._find(path)
        if not isinstance(node, _Folder):
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(path))
        return node

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> File:
        if create:
            self.step("create")
            inode = _Inode()
            self._folder(path.parent).change(path.name, inode)
            return MemoryFile(self, inode, write=True)
        node = self._find(path)
        if not isinstance(node, _Inode):
            raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
        return MemoryFile(self, node, write=write)

    def lock(self, path: Path) -> File:
        folder = self._folder(path.parent)
        if path.name not in folder.entries:
            self.step("create")
            folder.change(path.name, _Inode())
        node = self._find(path)
        assert isinstance(node, _Inode)
        if node.locked:
            raise BlockingIOError(errno.EAGAIN, "locked", str(path))
        node.locked = True
        return MemoryFile(self, node, write=True)

    def rename(self, old: Path, new: Path) -> None:
        node = self._find(old)
        self.step("rename")
        source, target = self._folder(old.parent), self._folder(new.parent)
        if source is target:
            entries = {name: each for name, each in source.entries.items() if name != old.name}
            source.entries = {**entries, new.name: node}
            source.history.append(source.entries)
            return
        target.change(new.name, node)
        source.change(old.name, None)

    def list(self, directory: Path) -> list[str]:
        try:
            return sorted(self._folder(directory).entries)
        except FileNotFoundError:
            return []

    def make_directory(self, directory: Path) -> None:
        node = self._root
        for part in directory.parts[1:]:
            if part not in node.entries:
                self.step("make directory")
                node.change(part, _Folder())
            below = node.entries[part]
            if not isinstance(below, _Folder):
                raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(directory))
            node = below

    def remove(self, path: Path) -> None:
        try:
            node = self._find(path)
        except FileNotFoundError:
            return
        if isinstance(node, _Folder) and node.entries:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        if self.on_remove is not None:
            self.on_remove(path)
        self.step("remove")
        folder = self._folder(path.parent)
        folder.change(path.name, None)
        if isinstance(node, _Inode):
            folder.removed[path.name] = node

    def sync_directory(self, directory: Path) -> None:
        folder = self._folder(directory)
        self.step("sync directory")
        folder.durable = folder.entries
        folder.history, folder.removed = [], {}

    def space(self, directory: Path) -> Space:
        self._folder(directory)
        return Space(max(0, self.room()), self.capacity)
