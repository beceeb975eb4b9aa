"""The steps of `fedsender probe`: the way of an attempt, up to where a transaction would be sent.

The client is the daemon's, by the daemon's configuration. This module
puts into words what it finds. No transaction is sent, and no file is written.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import trio

from fedsender.admin.display import listed, moment, took
from fedsender.config import Config, Policy
from fedsender.fairness import Payer
from fedsender.federation.client import (
    FederationClient,
    Peer,
    SendFailed,
    Unreachable,
    open_client,
)
from fedsender.federation.discovery import Resolved, is_literal
from fedsender.federation.discovery_cache import SRV_SERVICES
from fedsender.federation.proxy import ProxyBroken
from fedsender.federation.transport import answer_of, json_object, words
from fedsender.matrix import parse_server_name
from fedsender.runtime import OutOfResources, Runtime
from fedsender.telemetry import Metrics

__all__ = ["PROBE_S", "Report", "Step", "StepName", "probe"]

PROBE_S: Final = 180.0
"""Seconds for all steps together. Each step also has the time limit that the daemon gives it."""

StepName = Literal[
    "allowed", ".well-known", "SRV", "addresses", "connection", "TLS", "version", "keys"
]
_ORDER: Final[tuple[StepName, ...]] = get_args(StepName)
_NOT_ASKED: Final = "not asked: the address or the port is known"
_SHOWN: Final = 20
# The end of the year 9999.
_LAST_MOMENT_MS: Final = 253_402_300_799_999


@dataclass(frozen=True, slots=True)
class Step:
    """One step, done or failed.

    Attributes:
        ok: False: it failed, and it is the last one. `lines` then begin with the reason.
        took_ms: its time in milliseconds; None: that of the step before has it, too.
        lines: the findings in words; parts of them come from other servers.
    """

    name: StepName
    ok: bool
    took_ms: float | None
    lines: tuple[str, ...]

    def printed(self) -> Iterator[str]:
        """`lines` for a screen; the first begins with the name and the time."""
        start = f"{self.name:<12}{'' if self.took_ms is None else took(self.took_ms):>8}  "
        for number, line in enumerate(self.lines):
            failed = "" if self.ok or number else "failed: "
            yield f"{start if number == 0 else ' ' * len(start)}{failed}{line}"


@dataclass(frozen=True, slots=True)
class Report:
    """All steps of one probe; the last one has failed, or none has."""

    server: str
    steps: tuple[Step, ...]

    @property
    def failed(self) -> Step | None:
        """The step that failed; None: the server can be reached."""
        return next((step for step in self.steps if not step.ok), None)

    @property
    def summary(self) -> str:
        """The result in one line."""
        if self.failed is None:
            return f"fedsender can reach {self.server}"
        reason = f"{self.failed.name}: {self.failed.lines[0]}"
        if self.failed.name in ("version", "keys"):
            return f"fedsender reaches {self.server}, but no homeserver that is in order: {reason}"
        return f"fedsender cannot reach {self.server}: {reason}"

    def as_json(self) -> dict[str, object]:
        """The report as one JSON object; times in milliseconds."""
        failed = self.failed
        return {
            "server": self.server,
            "reachable": failed is None,
            "failed_step": failed and failed.name,
            "reason": failed and failed.lines[0],
            "steps": [
                {"step": step.name, "ok": step.ok, "took_ms": step.took_ms, "text": step.lines}
                for step in self.steps
            ],
        }


class _Failed(Exception):
    """The next step has failed; the arguments are its lines, the reason first."""


class _Walk:
    """The steps so far. They always come in the same order."""

    def __init__(self, seen: Callable[[Step], None]) -> None:
        self.steps: list[Step] = []
        self._seen = seen
        self._began = trio.current_time()

    def done(self, *lines: str, ok: bool = True, timed: bool = True) -> None:
        """The next step is over; `timed`: it took the time since the last one that was timed."""
        took_ms = None
        if timed:
            now = trio.current_time()
            took_ms, self._began = round((now - self._began) * 1000, 1), now
        self.steps.append(Step(_ORDER[len(self.steps)], ok, took_ms, lines))
        self._seen(self.steps[-1])


async def probe(
    config: Config, runtime: Runtime, server: str, seen: Callable[[Step], None]
) -> Report:
    """Take all steps to `server`, up to the first that fails, within about `PROBE_S` seconds.

    Args:
        server: a valid server name.
        seen: is called with each step when it is over; raises nothing.
    """
    walk, refusal = _Walk(seen), config.refusal(server)
    if refusal is not None:
        walk.done(f"nothing is sent to it: {refusal}", ok=False)
        return Report(server, tuple(walk.steps))
    sender = config.sender_of(server)
    who = "this sender" if config.handles(server) else f"another sender, {sender},"
    walk.done(f"yes; {who} sends to it")
    ours, policy = config.server_name, config.policy_for(server)
    within_s = policy.request_timeout
    async with (
        open_client(config.federation, runtime, ours, None, Metrics(ours)) as client,
        client.peer(server, policy, _Leave(server)) as peer,
    ):
        try:
            with trio.fail_after(PROBE_S):
                place = await _find(client, peer, policy, walk)
                await _connect(client, peer, policy, place, walk)
                said = await _ask(peer, "/_matrix/federation/v1/version", within_s, runtime)
                walk.done(_version(said))
                said = await _ask(peer, "/_matrix/key/v2/server", within_s, runtime)
                walk.done(_keys(said, server, runtime.now_ms()))
        except _Failed as failed:
            walk.done(*failed.args, ok=False)
        except (Unreachable, SendFailed) as failure:
            walk.done(failure.text, ok=False)
        except trio.TooSlowError:
            walk.done(f"the probe is not done within {PROBE_S:g} s", ok=False)
        except ProxyBroken as broken:
            walk.done(str(broken.strerror), ok=False)
        except OutOfResources as lack:
            walk.done(f"this machine has no room for a connection: {lack.strerror}", ok=False)
    return Report(server, tuple(walk.steps))


async def _find(client: FederationClient, peer: Peer, policy: Policy, walk: _Walk) -> Resolved:
    """Take the steps before the addresses. What was asked is in the client's cache afterwards."""
    failure, cache = None, client.discovery.cache
    try:
        place = await peer.resolve()
    except Unreachable as unreachable:
        failure = unreachable
    delegation, (host, port) = None, parse_server_name(peer.destination)
    if port is None and policy.address is None and not is_literal(host):
        delegation = cache.delegation(host.lower())
    if delegation is None:
        walk.done(_NOT_ASKED)
    elif delegation.server is None:
        walk.done(f"none: {delegation.text}")
    else:
        host, port = parse_server_name(delegation.server)
        walk.done(f"m.server is {delegation.server}")
    lines = []
    if delegation is not None and port is None and not is_literal(host):
        for name in (f"{service}.{host.lower()}" for service in SRV_SERVICES):
            if (lookup := cache.lookup(name, "SRV")) is not None:
                values = ", ".join(lookup.values)
                lines.append(f"{name}: {values}" if values else lookup.text)
    if failure is None or not failure.text.startswith(SRV_SERVICES):
        walk.done(*lines or [_NOT_ASKED], timed=False)
    if failure is not None:
        raise failure
    return place


async def _connect(
    client: FederationClient, peer: Peer, policy: Policy, place: Resolved, walk: _Walk
) -> None:
    """Take the steps from the addresses to TLS."""
    ranges, lines = client.config.ip_ranges, []
    for ip, port in place.candidates:
        verdict = f"{'permitted' if ranges.permit(ip) else 'forbidden'}: {ranges.verdict(ip)}"
        if policy.address is not None:
            verdict = "permitted: the configuration gives it in destinations"
        lines.append(f"{ip} port {port}: {verdict}")

    def note_connection() -> None:
        walk.done(*lines, timed=False)
        ports = dict(place.candidates)
        if (ip := client.dialer.worked(place.tls_name)) in ports:
            walk.done(f"{ip} port {ports[ip]}")

    try:
        await peer.connect()
    except Unreachable as failure:
        # Where .well-known says that the server is gone, its kind stands above that of the cause.
        cause = failure.__cause__ if isinstance(failure.__cause__, Unreachable) else failure
        if cause.kind == "blocked":
            raise _Failed(failure.text, *lines) from failure
        if cause.kind == "tls" or cause.text.startswith("no TLS"):
            note_connection()
        else:
            walk.done(*lines, timed=False)
        raise
    note_connection()
    checked = policy.verify_certificates
    if client.config.verify_certificates if checked is None else checked:
        walk.done(f"the certificate is good for {place.tls_name}", timed=False)
    else:
        walk.done("not checked: the configuration has verify_certificates: false", timed=False)


async def _ask(peer: Peer, target: str, within_s: float, runtime: Runtime) -> dict[str, Any]:
    """The JSON object at `target`; raises _Failed, and as `Peer.get`."""
    try:
        with trio.fail_after(within_s):
            response = await peer.get(target)
    except trio.TooSlowError:
        raise _Failed(f"no answer to GET {target} within {within_s:g} s") from None
    if response.status != 200:
        answer = answer_of(response, (), reused=False, now_ms=runtime.now_ms)
        raise _Failed(f"GET {target} was answered {response.status}: {answer.text or 'no text'}")
    document = json_object(response.body)
    if document is None:
        raise _Failed(f"the answer to GET {target} is not a JSON object, or has too many parts")
    return document


def _version(document: Mapping[str, Any]) -> str:
    server = document.get("server", {})
    found = [server.get(key, "") for key in ("name", "version")] if type(server) is dict else [None]
    texts = [words(each) for each in found if isinstance(each, str)]
    if len(texts) < len(found):
        raise _Failed("the answer has a field server that is not an object with texts")
    return " ".join(texts).strip() or "the server does not say what it runs"


def _keys(document: Mapping[str, Any], server: str, now_ms: int) -> str:
    name, keys = document.get("server_name"), document.get("verify_keys")
    until = document.get("valid_until_ts")
    if name != server:
        raise _Failed(f"the field server_name is {words(repr(name))}, not {server}")
    if not isinstance(keys, dict) or not keys:
        raise _Failed("the field verify_keys has no keys")
    if type(until) is not int or not 0 <= until <= _LAST_MOMENT_MS:
        raise _Failed("the field valid_until_ts is not a time in milliseconds")
    ids = [words(each) for each in sorted(keys)]
    line = f"{server}: {listed(ids, _SHOWN)}; valid until {moment(until)}"
    if until < now_ms:
        raise _Failed(f"the keys were valid until {moment(until)} only", line)
    return line


class _Leave:
    """The permission that is always given: a probe is one attempt, beside those of the daemon."""

    hurried = False

    def __init__(self, server: str) -> None:
        self.payer = Payer(server)

    def at_once(self) -> bool:
        return True

    async def place(self) -> None: ...

    async def turn(self) -> None: ...

    async def handshake(self) -> None: ...

    def asked(self) -> None: ...
