"""What a shadow tells: a file with one JSON object per line, and a summary.

`shadow.jsonl` in the ledger's directory, mode 0600, begun anew at a size (the old one stays beside
it). `what` is "pdu" (what we would have sent, and to whom), "difference", or "quarantined".
Event ids and server names are in it, content never.
"""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from fedsender.shadow.book import Book, Difference, Expected

REPORT_VERSION = 1
MAX_BYTES = 256 * 1024 * 1024
FILE_NAME = "shadow.jsonl"


@dataclass(slots=True)
class Report:
    """Writes the lines and keeps the counts.

    Attributes:
        differences: how many, by (kind, the weakness that explains it).
        heard: EDU facts heard of, by kind: what we would have made EDUs of.
    """

    directory: Path
    pdus: int = 0
    deliveries: int = 0
    unexplained: int = 0
    differences: Counter[tuple[str, str | None]] = field(default_factory=Counter)
    heard: Counter[str] = field(default_factory=Counter)
    servers: set[str] = field(default_factory=set)

    @property
    def path(self) -> Path:
        """Where the lines are."""
        return self.directory / FILE_NAME

    def would_send(self, events: Iterable[Expected], now_ms: int) -> None:
        """We would have sent these."""
        lines = []
        for event in events:
            self.pdus += 1
            self.deliveries += len(event.servers)
            self.servers |= event.servers
            lines.append(
                {
                    "what": "pdu",
                    "event_id": event.event_id,
                    "room_id": event.room_id,
                    "stream_ordering": event.stream_ordering,
                    "servers": sorted(event.servers),
                }
            )
        self._write(lines, now_ms)

    def quarantined(self, events: Iterable[tuple[str, str, str]], now_ms: int) -> None:
        """We would have put these (event id, room id, reason) into quarantine."""
        lines = [
            {"what": "quarantined", "event_id": event_id, "room_id": room_id, "reason": reason}
            for event_id, room_id, reason in events
        ]
        self.heard["quarantined events"] += len(lines)
        self._write(lines, now_ms)

    def differ(self, differences: Sequence[Difference], now_ms: int) -> None:
        """Synapse's worker differs there."""
        for difference in differences:
            self.differences[difference.kind, difference.because] += 1
            self.unexplained += not difference.explained
        self._write(
            [
                {
                    "what": "difference",
                    "kind": difference.kind,
                    "server": difference.server,
                    "room_id": difference.room_id,
                    "event_id": difference.event_id,
                    "stream_ordering": difference.stream_ordering,
                    "because": difference.because,
                }
                for difference in differences
            ],
            now_ms,
        )

    def _write(self, lines: Sequence[dict[str, Any]], now_ms: int) -> None:
        """Append whole lines; raises OSError. A shadow that cannot report is of no use."""
        if not lines:
            return
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with suppress(FileNotFoundError):
            if self.path.stat().st_size > MAX_BYTES:
                self.path.replace(self.path.with_suffix(".old.jsonl"))
        data = b"".join(
            orjson.dumps({"v": REPORT_VERSION, "ms": now_ms, **line}) + b"\n" for line in lines
        )
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(data)

    def show(self, book: Book, console: Console) -> None:
        """Print the summary."""
        table = Table("what", "count", title="What a shadow saw", title_justify="left")
        table.add_row("events that we would have sent", str(self.pdus))
        table.add_row("deliveries (event, server)", str(self.deliveries))
        table.add_row("servers", str(len(self.servers)))
        table.add_row("events held against Synapse's tables", str(book.compared))
        table.add_row("events Synapse's worker has yet to reach", str(book.uncompared))
        if book.passed_over:
            table.add_row("left out for want of room", str(book.passed_over))
        for kind, count in sorted(self.heard.items()):
            table.add_row(kind, str(count))
        if len(book.answer_s) > 1:
            cuts = quantiles(book.answer_s, n=100)
            table.add_row(
                "Synapse's worker, read to answered", f"p50 {cuts[49]:.1f} s, p99 {cuts[98]:.1f} s"
            )
        for (kind, because), count in sorted(self.differences.items(), key=str):
            table.add_row(f"{kind}" + (f" ({because})" if because else ""), str(count))
        table.add_row("differences that nothing explains", str(self.unexplained))
        console.print(table)
        console.print(f"each one: {self.path}", soft_wrap=True)
