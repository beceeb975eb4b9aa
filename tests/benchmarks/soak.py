"""A soak: many servers, a tenth of them dead, for half an hour, while the daemon is watched.

The daemon is `fedsender run` as an operator starts it, with the settings that it has by itself, and
follows `fedsender relay`, for only a relay brings every kind of EDU to an embedded store. This
process is the homeserver and all receiving servers, which hold each transaction against every rule.
"""

import argparse
import re
import resource
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import httpx
import orjson
import trio
from tests.benchmarks.soak_stage import START_S, Run, SoakOptions, open_run
from tests.benchmarks.soak_trend import JUDGED_S, MAX_GROWTH_MB, MAX_RISE, Sample, Trend, trend

from fedsender.config import Log
from fedsender.console import say, say_json
from fedsender.runtime import real_runtime
from fedsender.telemetry import configure_logging
from fedsender_lab.bench.meter import cpu_s_of, machine
from fedsender_lab.demo import process
from fedsender_lab.demo.process import DaemonDied, own_and_rss_kb
from fedsender_lab.demo.report import Ledger, judge, ledger_of, still_owed, unrecorded
from fedsender_lab.testing.children import BenchFailed, texts_of

SAMPLE_S: Final = 10.0
SAMPLES: Final = 12
"""At least so many, in a run of seconds."""
LOOK_S: Final = 0.2
ADMIN_S: Final = 60.0
COMPLETE_S: Final = 300.0
"""After the traffic has ended and all servers are well, for what they are still owed."""
GAP_EVENTS: Final = 100
"""As the daemon has it (`catch_up_gap_events`)."""
FILES_PER_SERVER: Final = 4
FILES_BESIDE: Final = 200
SHOWN: Final = 10


def main(arguments: Sequence[str]) -> int:
    """`python -m tests.benchmarks.soak`; its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.soak",
        description="The daemon under steady mixed traffic: does its memory grow, does a"
        " transaction cost more and more?",
        epilog=f"The daemon's own memory must grow by less than {MAX_GROWTH_MB:g} MB per 10 minutes"
        " (least squares) after the first 10 minutes, and CPU per transaction must not rise: at"
        f" most {MAX_RISE:g} times as much in the last 10 minutes as in the second. A run of less"
        f" than {JUDGED_S / 60:.0f} minutes has figures for thirds of it and is not judged by"
        " these. Nothing may be lost, out of order, sent twice or against the specification,"
        " however short it is. Exit code 1: one of these is not so; the text says which.",
    )
    default = SoakOptions()
    parser.add_argument("--minutes", type=float, default=default.minutes)
    parser.add_argument("--servers", type=int, default=default.servers)
    parser.add_argument("--dead", type=float, default=default.dead, help="their share, 0 to 1")
    parser.add_argument(
        "--rate",
        type=float,
        default=default.rate,
        help=f"deliveries per second (default {default.rate:g}); less on a slower machine",
    )
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--samples", type=Path, metavar="FILE", help="write every sample there")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep all files in this directory")
    try:
        options = SoakOptions(**vars(parser.parse_args(arguments)))
        if not (options.minutes > 0 and options.servers > 0 and options.rate > 0):
            parser.error("minutes, servers and rate must be more than 0")
        if not 0 <= options.dead < 1:
            parser.error("--dead must be a share, 0 or more and less than 1")
    except SystemExit as ended:
        return int(ended.code or 0)
    return run_soak(options)


def run_soak(options: SoakOptions) -> int:
    """Run it; its exit code. Progress and table go to standard error, one JSON line to output."""
    configure_logging(Log(level="error"), now_ms=real_runtime().now_ms)
    _allow_files(FILES_PER_SERVER * options.servers + FILES_BESIDE)
    figures: dict[str, Any] | None = None
    try:
        with _directory(options.keep) as directory:
            figures = trio.run(_soak, options, directory)
    except* (BenchFailed, DaemonDied) as group:
        for text in texts_of(group):
            _say(f"soak: {text}")
    if figures is None:
        return 1
    say_json({"bench": "soak", **figures, **machine()})
    return 1 if figures["missed"] or figures["broken"] else 0


def _say(text: str) -> None:
    say(text, error=True)


def _allow_files(count: int) -> None:
    """So many open files, for this process and those that it starts, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="fedsender-soak-") as name:
            yield Path(name)
        return
    try:
        keep.mkdir(parents=True, exist_ok=True, mode=0o700)
        process.socket_in(keep.absolute() / "sender", "admin.sock")
        if any(keep.iterdir()):
            raise BenchFailed(f"{keep} is not empty: --keep wants a directory of its own")
    except (OSError, ValueError) as error:
        raise BenchFailed(f"--keep {keep}: {error}") from error
    yield keep.absolute()


# --- one run --------------------------------------------------------------------------------------


async def _soak(options: SoakOptions, directory: Path) -> dict[str, Any]:
    async with open_run(options, directory) as run, _open_admin(run) as admin:
        async with trio.open_nursery() as nursery:
            await _until_up(run, admin)
            nursery.start_soon(run.traffic.go_on)
            nursery.start_soon(run.servers.live)
            await _watch(run, admin)
            nursery.cancel_scope.cancel()
        seen = trend(run.samples)
        _show(run, seen)
        broken = await _end(run, admin)
    for text in (*seen.missed, *broken[:SHOWN]):
        _say(f"soak: {text}")
    return _figures(run, seen, broken)


# --- watching -------------------------------------------------------------------------------------


def _open_admin(run: Run) -> httpx.AsyncClient:
    socket = httpx.AsyncHTTPTransport(uds=str(run.daemon.directory / "admin.sock"))
    return httpx.AsyncClient(transport=socket, base_url="http://daemon", timeout=ADMIN_S)


async def _until_up(run: Run, admin: httpx.AsyncClient) -> None:
    with trio.move_on_after(START_S):
        while True:
            try:
                await admin.get("/ready")
            except httpx.TransportError:
                await trio.sleep(LOOK_S)
            else:
                return
    raise BenchFailed(f"the daemon does not come up\n{run.daemon.last_words()}")


async def _watch(run: Run, admin: httpx.AsyncClient) -> None:
    """Take a sample at the start, every 10 s, and at the end."""
    began, seconds = trio.current_time(), run.options.minutes * 60
    every_s = min(SAMPLE_S, seconds / SAMPLES)
    at_s = 0.0
    while True:
        await trio.sleep_until(began + at_s)
        # As Prometheus does; what it costs and holds belongs to the daemon.
        await _metrics(run, admin)
        _take_sample(run, trio.current_time() - began)
        if at_s >= seconds:
            return
        at_s = min(at_s + every_s, seconds)


async def _metrics(run: Run, admin: httpx.AsyncClient) -> str:
    try:
        return (await admin.get("/metrics")).raise_for_status().text
    except httpx.HTTPError as error:
        raise BenchFailed(f"/metrics: {error!r}\n{run.daemon.last_words()}") from error


def _take_sample(run: Run, at_s: float) -> None:
    try:
        own_kb, rss_kb = own_and_rss_kb(run.daemon.pid)
        cpu_s = cpu_s_of(run.daemon.pid)
        relay_kb, _ = own_and_rss_kb(run.relay.pid)
    except OSError as error:
        raise BenchFailed(f"a process is gone: {error}\n{run.daemon.last_words()}") from error
    answered = run.servers.answered
    sample = Sample(at_s, own_kb / 1024, rss_kb / 1024, cpu_s, answered)
    before = run.samples[-1] if run.samples else None
    run.samples.append(sample)
    run.relay_mb.append(relay_kb / 1024)
    if run.options.samples is not None:
        with run.options.samples.open("ab") as file:
            file.write(orjson.dumps({**asdict(sample), "relay_mb": relay_kb / 1024}) + b"\n")
    pace = ""
    if before is not None and at_s > before.at_s:
        seconds, count = at_s - before.at_s, answered - before.transactions
        cpu = sample.cpu_s - before.cpu_s
        each = f"{cpu * 1000 / count:.2f} ms each" if count else "none"
        pace = f"  CPU {cpu / seconds:4.0%}  {count / seconds:4.0f} transactions/s, {each}"
    _say(
        f"soak {int(at_s) // 60:3}:{int(at_s) % 60:02}  own {sample.own_mb:6.1f} MB"
        f"  resident {sample.rss_mb:6.1f} MB{pace}  away {run.servers.away}"
    )


def _show(run: Run, seen: Trend) -> None:
    _say("\nfrom-to min   own MB  resident MB  MB/10 min  transactions  CPU ms each")
    for window in seen.windows:
        each = window.cpu_ms_per_transaction
        _say(
            f"{window.from_s / 60:5.1f}-{window.upto_s / 60:5.1f}  {window.own_mb:7.1f}"
            f"  {window.rss_mb:11.1f}  {window.growth_mb:9.2f}  {window.transactions:12}"
            f"  {'-' if each is None else f'{each:.3f}':>11}"
        )
    rise = "unknown" if seen.rise is None else f"{seen.rise:.2f} x"
    _say(
        f"after the first window: {seen.growth_mb:+.2f} MB per 10 minutes; CPU per transaction,"
        f" last window to second: {rise}"
    )
    if not seen.judged:
        _say(f"not judged: that takes {JUDGED_S / 60:.0f} minutes\n")


# --- the end --------------------------------------------------------------------------------------


async def _end(run: Run, admin: httpx.AsyncClient) -> list[str]:
    """Every server comes back and gets what it is owed. Return what was wrong, in words."""
    await run.servers.all_well()
    began = trio.current_time()
    while True:
        looked = trio.current_time()
        lacking = await _not_level(run, admin) or _lacking(run, ledger_of([run.daemon.directory]))
        if not lacking or looked - began > COMPLETE_S:
            break
        # Judging takes the longer the more there is: never more than a quarter of the time.
        await trio.sleep(max(1.0, 3 * (trio.current_time() - looked)))
    code = await run.daemon.stop()
    await run.relay.stop()
    ledger = ledger_of([run.daemon.directory])
    verdict = judge(run.traffic.steps, run.receivers, ledger, gap_events=GAP_EVENTS)
    violations = run.receivers.violations
    return [
        *_lacking(run, ledger),
        *verdict.wrong,
        *(f"{each.server}: {each.rule}: {each.detail}" for each in violations.first),
        *unrecorded(run.receivers, ledger, []),
        *still_owed(run.daemon.directory),
        *([f"the daemon's exit code is {code}"] if code else []),
        *run.daemon.errors(),
    ]


async def _not_level(run: Run, admin: httpx.AsyncClient) -> list[str]:
    """The states of servers that are not level; an EDU may be owed, too, or be under way."""
    states = r'^fedsender_destinations\{.*state="(?!level)(.*)"\} (?!0)'
    return re.findall(states, await _metrics(run, admin), re.MULTILINE)


def _lacking(run: Run, ledger: Ledger) -> list[str]:
    """What did not arrive, and is not superseded."""
    missing = judge(run.traffic.steps, run.receivers, ledger, gap_events=GAP_EVENTS).missing
    for name, count in run.traffic.to_device.items():
        got = run.servers.to_device[name]
        if got != count:
            missing.append(f"{name} got {got} of {count} messages to devices")
    return missing


def _figures(run: Run, seen: Trend, broken: Sequence[str]) -> dict[str, Any]:
    options, last = run.options, run.samples[-1]
    counts = run.receivers.totals()
    return {
        "minutes": options.minutes,
        "servers": options.servers,
        "dead": len(run.servers.parts),
        "deliveries_per_second": options.rate,
        "late_s": round(run.traffic.late_s, 1),
        "transactions": last.transactions,
        "attempts": counts["attempts"],
        "pdus": counts["pdus"],
        "edus": dict(run.servers.edus),
        "said": dict(run.traffic.said),
        "own_mb": [round(run.samples[0].own_mb, 1), *(round(w.own_mb, 1) for w in seen.windows)],
        "rss_mb": round(last.rss_mb, 1),
        "growth_mb_per_10_min": round(seen.growth_mb, 2),
        "cpu_ms_per_transaction": [
            None if (each := w.cpu_ms_per_transaction) is None else round(each, 3)
            for w in seen.windows
        ],
        "cpu_rise": None if seen.rise is None else round(seen.rise, 3),
        "relay_mb": [round(run.relay_mb[0], 1), round(run.relay_mb[-1], 1)],
        "judged": seen.judged,
        "goal": {"growth_mb_per_10_min": MAX_GROWTH_MB, "cpu_rise": MAX_RISE},
        "missed": list(seen.missed),
        "broken": list(broken[:SHOWN]),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
