"""The attempt log: attempts under way, in a file that outlives a kill (I9).

The ledger has a line for each attempt once it has ended. An attempt that a kill cuts off has none.
So each attempt is noted here before its first byte leaves, in a slot that is wiped when the line is
written. The next start writes a line with outcome "unknown" for each slot that was not wiped.
Nothing here is needed to send: if the disk is full, attempts are not noted.

The file is beside the ledger's segments as `<instance>.<boot>.attempts`, mode 0600. It is mapped
into memory, because it is written twice for each attempt and need only outlive the process. The
disk is only asked for room, now and then.
"""

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import orjson

from fedsender.ledger import Line, TransactionRecord
from fedsender.segments import read_lines
from fedsender.sender.transaction import Transaction

SLOT_BYTES = 12_288
"""Enough for 50 PDUs; a longer transaction is noted without its content."""
MAX_SLOTS = 4096
SLOTS_AT_ONCE = 64
"""The number of slots by which the file grows."""
_LENGTH_BYTES = 4
_EMPTY = bytes(_LENGTH_BYTES)


class AttemptLog:
    """The slots of this boot. Made by `open_attempt_log`."""

    def __init__(self, file: int | None) -> None:
        """`file`: its descriptor; None if it could not be opened: then nothing is noted."""
        self._file = file
        self._map: mmap.mmap | None = None
        self._free: list[int] = []
        self._slots = 0

    def begin(self, destination: str, transaction: Transaction, now_ms: int) -> int | None:
        """Note that this attempt is about to leave; the slot for `end`, or None.

        The slot has the line that the ledger gets if nobody lives to write another one.
        """
        if not self._free:
            self._grow()
        if self._map is None or not self._free:
            return None
        line = Line(
            ms=now_ms,
            destination=destination,
            outcome="unknown",
            transaction_id=transaction.id,
            attempt=transaction.attempts,
            record=transaction.record,
            bytes=len(transaction.body),
            reason="the daemon was killed",
        )
        note = orjson.dumps(line.as_json())
        if len(note) > SLOT_BYTES - _LENGTH_BYTES:
            note = orjson.dumps(line._replace(record=TransactionRecord()).as_json())
        slot = self._free.pop()
        at = slot * SLOT_BYTES
        self._map[at : at + _LENGTH_BYTES + len(note)] = len(note).to_bytes(_LENGTH_BYTES) + note
        return slot

    def end(self, slot: int | None) -> None:
        """Wipe the slot: the ledger has the line."""
        if slot is None or self._map is None:
            return
        at = slot * SLOT_BYTES
        self._map[at : at + _LENGTH_BYTES] = _EMPTY
        self._free.append(slot)

    def _grow(self) -> None:
        """Ask the disk for room for more slots, as long as it has any."""
        if self._file is None or self._slots >= MAX_SLOTS:
            return
        size, more = self._slots * SLOT_BYTES, SLOTS_AT_ONCE * SLOT_BYTES
        try:
            # A hole in the file that turned out not to fit would end the process at a touch.
            os.posix_fallocate(self._file, size, more)
            if self._map is None:
                self._map = mmap.mmap(self._file, size + more)
            else:
                self._map.resize(size + more)
        except OSError:
            return
        self._free += range(self._slots + SLOTS_AT_ONCE - 1, self._slots - 1, -1)
        self._slots += SLOTS_AT_ONCE

    def close(self) -> None:
        """Note nothing more."""
        if self._map is not None:
            self._map.close()
        if self._file is not None:
            os.close(self._file)
        self._map = self._file = None
        self._free.clear()


@contextmanager
def open_attempt_log(directory: Path, instance: str, boot: str) -> Iterator[AttemptLog]:
    """Open slots for this boot. An orderly end leaves no file: every attempt has its line."""
    path = directory / f"{instance}.{boot}.attempts"
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        file: int | None = os.open(path, flags, 0o600)
    except OSError:
        file = None
    attempt_log = AttemptLog(file)
    try:
        yield attempt_log
    except Exception:
        # The attempts that this cut off have their lines.
        path.unlink(missing_ok=True)
        raise
    else:
        path.unlink(missing_ok=True)
    finally:
        attempt_log.close()


def cut_off(directory: Path, instance: str, torn: Sequence[Path]) -> tuple[list[Line], list[Path]]:
    """The attempts that a kill cut off, as lines, and the files to delete once they are written.

    Args:
        torn: the ledger's segments that the same kill left open; an attempt with a line there is
            left out.
    """
    # An instance's name may have dots in it, and so may another's that begins alike.
    found = (path for path in directory.iterdir() if path.suffix == ".attempts")
    paths = sorted(path for path in found if path.stem.rpartition(".")[0] == instance)
    cut = {(line.transaction_id, line.attempt): line for path in paths for line in _lines(path)}
    for path in torn if cut else ():
        for known in read_lines(path):
            cut.pop((known.get("transaction_id"), known.get("attempt", 0)), None)
    return sorted(cut.values(), key=lambda line: (line.ms, line.destination)), paths


def _lines(path: Path) -> Iterator[Line]:
    with path.open("rb") as file:
        while slot := file.read(SLOT_BYTES):
            length = int.from_bytes(slot[:_LENGTH_BYTES])
            if not length:
                continue
            # A slot that a kill left half written has no line.
            with suppress(orjson.JSONDecodeError, KeyError, TypeError):
                yield Line.from_json(orjson.loads(slot[_LENGTH_BYTES : _LENGTH_BYTES + length]))
