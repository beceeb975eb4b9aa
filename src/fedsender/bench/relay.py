"""The relay's log: how fast it takes records in, and how soon it is open again.

The floor of `relay_append` is the same number of bytes written and synced in the same pieces with
nothing around it; so the ratio says what the log adds, whatever the disk.
"""

import os
import shutil
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import trio

from fedsender.bench.meter import Meter, Options, median
from fedsender.demo.children import BenchFailed
from fedsender.intake.intake import KEY_BYTES
from fedsender.intake.rows import Prepared, prepare
from fedsender.outside import Outside, real_outside
from fedsender.relay.disk import RealDisk
from fedsender.relay.files import LogFiles
from fedsender.relay.log import LogSettings, open_log
from fedsender.relay.recovery import Evidence, open_files
from fedsender.relay.segment import FRAME_BYTES
from fedsender.replication.commands import Json

GROUPS: Final = (1, 16, 128, 1024)
# A group of one waits for the disk each time: fewer of them say as much.
_ENOUGH_ALONE: Final = 2_000
_BODY: Final = "x" * 600
_MIB: Final = 2**20


def row(number: int) -> Json:
    """A message of about 1 KB."""
    event = {
        "type": "m.room.message",
        "room_id": "!room:relay.test",
        "sender": "@user:relay.test",
        "origin_server_ts": 1_790_000_000_000 + number,
        "depth": number,
        "prev_events": [f"$event{number - 1}"],
        "content": {"msgtype": "m.text", "body": _BODY},
    }
    return ["pdu", ["!room:relay.test", f"$event{number}", event, {"room_version": "11"}]]


def _records(first: int, records: int) -> list[tuple[bytes, Prepared]]:
    numbers = range(first, first + records)
    return [(b"%0*d" % (KEY_BYTES, number), prepare([row(number)])) for number in numbers]


async def relay_append(options: Options) -> dict[str, Any]:
    """How many records of about 1 KB become durable in a second, by how many share a sync.

    `options.events` is how many are appended for each size of group.
    """
    groups: dict[str, dict[str, float]] = {}
    with TemporaryDirectory(prefix="fedsender-bench-") as name:
        for group in GROUPS:
            records = min(options.events, _ENOUGH_ALONE * group)
            rounds = [
                await _append(Path(name) / f"{group}-{number}", group, records)
                for number in range(options.rounds)
            ]
            groups[str(group)] = {
                figure: median([each[figure] for each in rounds], 2) for figure in rounds[0]
            }
    size = FRAME_BYTES + len(prepare([row(1)]).lines(1))
    return {"record_bytes": size, "records": options.events, "groups": groups}


async def _append(directory: Path, group: int, records: int) -> dict[str, float]:
    begun = time.perf_counter()
    prepared = _records(1, records)
    prepare_s = time.perf_counter() - begun
    calls = [prepared[at : at + group] for at in range(0, len(prepared), group)]
    async with open_log(directory, RealDisk(), real_outside()) as log:
        await log.append([row(0)])
        meter = Meter()
        for call in calls:
            await log.append_all(call)
        used = meter.read()
    floor_s = await trio.to_thread.run_sync(_floor, directory / "floor", calls)
    return {
        "records_per_s": records / used.wall_s,
        "floor_records_per_s": records / floor_s,
        "ratio": used.wall_s / floor_s,
        "cpu_us_per_record": used.cpu_s / records * 1e6,
        "prepare_us_per_record": prepare_s / records * 1e6,
    }


def _floor(path: Path, calls: Sequence[Sequence[tuple[bytes, Prepared]]]) -> float:
    """Seconds for the same bytes, written and synced in the same pieces."""
    texts = [bytes(sum(FRAME_BYTES + record.size for _, record in call)) for call in calls]
    begun = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for text in texts:
            file.write(text)
            os.fdatasync(file.fileno())
    return time.perf_counter() - begun


async def relay_recovery(options: Options) -> dict[str, Any]:
    """How long until a log of `options.events` MiB is open: after a kill, and closed in order.

    And how long it takes to read all of it with its checksums, which a start does not.
    """
    with TemporaryDirectory(prefix="fedsender-bench-") as name:
        directory = Path(name)
        free = shutil.disk_usage(directory).free
        if free < 1.1 * options.events * _MIB:
            raise BenchFailed(f"{name} has room for {free // _MIB} MiB only")
        outside = real_outside()
        written = await trio.to_thread.run_sync(_fill, directory, options.events * _MIB, outside)
        settings = LogSettings()
        seconds: dict[str, list[float]] = {"after_kill_s": [], "in_order_s": [], "all_read_s": []}
        for number in range(options.rounds):
            if number == 0:
                seconds["after_kill_s"].append(await _open(directory, outside, settings))
            seconds["in_order_s"].append(await _open(directory, outside, settings))
            seconds["all_read_s"].append(
                await _open(directory, outside, settings, accept_loss=True)
            )
    return {
        "mib": options.events,
        **written,
        **{figure: median(each) for figure, each in seconds.items()},
        "all_read_mib_per_s": round(options.events / min(seconds["all_read_s"])),
    }


def _fill(directory: Path, size: int, outside: Outside) -> dict[str, int]:
    """A log of this size, left as a kill leaves it: its newest segment is not sealed."""
    disk = RealDisk()
    epoch = outside.entropy(8).hex
    opened = open_files(directory, disk, Evidence(), epoch, 1, accept_loss=False)
    files = LogFiles(directory, disk, opened)
    limit = LogSettings().segment_bytes
    group = [record for _, record in _records(1, 1024)]
    keys = count(1)
    done = 0
    while done < size:
        info = files.open_segment
        if info is not None and info.bytes >= limit:
            done += info.bytes
            files.seal()
        room = size - done - (0 if files.open_segment is None else files.open_segment.bytes)
        if room <= 0:
            break
        files.append([(b"%0*d" % (KEY_BYTES, next(keys)), each) for each in group], 1)
    segments = files.segments
    files.close()
    return {"segments": len(segments), "records": files.head}


async def _open(
    directory: Path, outside: Outside, settings: LogSettings, *, accept_loss: bool = False
) -> float:
    begun = time.perf_counter()
    opening = open_log(directory, RealDisk(), outside, settings, accept_loss=accept_loss)
    async with opening as log:
        took = time.perf_counter() - begun
        if log.head == 0:
            raise BenchFailed("the log is empty")
    return took
