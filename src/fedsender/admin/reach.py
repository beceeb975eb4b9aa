"""The steps of `fedsender probe`: the way of an attempt, up to where a transaction would be sent.

The client is the daemon's, by the daemon's configuration and its cache of discovery. It tells each
step as it does it (`federation.client.Stage`). This module measures the steps and puts them into
words. No transaction is sent, and no file is written.
"""

import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

import trio
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

from fedsender.admin.display import listed, many, moment, took
from fedsender.config import Config
from fedsender.config.values import IPRanges
from fedsender.federation.answer import answer_of, json_object
from fedsender.federation.client import (
    FederationClient,
    Peer,
    SendFailed,
    Stage,
    Unreachable,
    open_client,
)
from fedsender.federation.dialing import Reached, TlsPolicy
from fedsender.federation.discovery import AskDns, AskWellKnown, Resolved
from fedsender.federation.discovery_cache import Delegation, Lookup
from fedsender.federation.proxy import ProxyBroken
from fedsender.federation.transport import Connection, causes, words
from fedsender.runtime import OutOfResources, Runtime
from fedsender.telemetry import Metrics
from fedsender.tls import TlsStream

__all__ = ["PROBE_S", "Report", "Step", "StepName", "probe"]

PROBE_S: Final = 180.0
"""Seconds for all steps together. Each step also has the time limit that the daemon gives it. A
look at a refused certificate comes after that, with the daemon's limits for TCP and TLS."""

StepName = Literal[
    "allowed", ".well-known", "SRV", "addresses", "connection", "TLS", "version", "keys"
]
_ORDER: Final[tuple[StepName, ...]] = get_args(StepName)
_SHOWN: Final = 20
_DAY_MS: Final = 86_400_000
# A certificate ends soon if less than this is left, and less than a third of its life: some
# authorities give certificates for six days only.
_SOON_MS: Final = 7 * _DAY_MS
# The end of the year 9999.
_LAST_MOMENT_MS: Final = 253_402_300_799_999
# The errors of `cryptography` for a certificate that OpenSSL takes.
_UNREADABLE: Final = (
    ValueError,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)


@dataclass(slots=True)
class Step:
    """One step, done or failed.

    Attributes:
        ok: False: it failed, and it is the last one. `lines` then begin with the reason.
        took_ms: its time in milliseconds.
        lines: the findings in words; parts of them come from other servers.
        facts: the findings as JSON values.
    """

    name: StepName
    ok: bool = True
    took_ms: float = 0.0
    lines: list[str] = field(default_factory=list)
    facts: dict[str, object] = field(default_factory=dict)

    def printed(self) -> Iterator[str]:
        """`lines` for a screen; the first begins with the name and the time."""
        start = f"{self.name:<12}{took(self.took_ms):>8}  "
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
        return f"fedsender cannot reach {self.server}: {self.failed.name}: {self.failed.lines[0]}"

    def as_json(self) -> dict[str, object]:
        """The report as one JSON object; times in milliseconds."""
        failed = self.failed
        return {
            "server": self.server,
            "reachable": failed is None,
            "failed_step": failed and failed.name,
            "reason": failed and failed.lines[0],
            "took_ms": round(sum(step.took_ms for step in self.steps), 1),
            "steps": [
                {
                    "step": step.name,
                    "ok": step.ok,
                    "took_ms": round(step.took_ms, 1),
                    "text": step.lines,
                    **step.facts,
                }
                for step in self.steps
            ],
        }


async def probe(
    config: Config, runtime: Runtime, server: str, seen: Callable[[Step], None]
) -> Report:
    """Take all steps to `server`, up to the first that fails, within about `PROBE_S` seconds.

    Args:
        server: a valid server name.
        seen: is called with each step when it is over; raises nothing.
    """
    walk = _Walk(config, runtime, server, seen)
    refusal = config.refusal(server)
    sender = config.sender_of(server)
    walk.facts["sender"] = sender
    if refusal is not None:
        walk.fail(f"nothing is sent to it: {refusal}")
        return walk.report()
    who = "this sender" if config.handles(server) else f"another sender, {sender},"
    walk.note(f"yes; {who} sends to it")
    ours, metrics = config.server_name, Metrics(config.server_name)
    async with open_client(config.federation, runtime, ours, None, metrics) as client:
        await walk.go(client)
    return walk.report()


class _Unfit(Exception):
    """An answer that no homeserver gives; the text is the reason in words."""


class _Walk:
    """The steps so far, and the one under way.

    Attributes:
        facts: those of the step under way.
    """

    def __init__(
        self, config: Config, runtime: Runtime, server: str, seen: Callable[[Step], None]
    ) -> None:
        self._config = config
        self._policy = config.policy_for(server)
        self._runtime = runtime
        self._server = server
        self._seen = seen
        self._done: list[Step] = []
        self._step = Step(_ORDER[0])
        self._began = trio.current_time()
        self._client: FederationClient | None = None
        self._question: AskDns | AskWellKnown | None = None
        self._place: Resolved | None = None
        self._reached: Reached | None = None

    @property
    def facts(self) -> dict[str, object]:
        return self._step.facts

    def note(self, line: str) -> None:
        """Add a finding to the step under way."""
        self._step.lines.append(line)

    def fail(self, reason: str) -> None:
        """End the step under way, and with it the probe."""
        self._step.ok = False
        self._step.lines.insert(0, reason)
        self._end()

    def report(self) -> Report:
        return Report(self._server, tuple(self._done))

    def _end(self) -> None:
        now = trio.current_time()
        self._step.took_ms, self._began = (now - self._began) * 1000, now
        self._done.append(self._step)
        self._seen(self._step)

    def _enter(self, name: StepName) -> None:
        """End the step under way and begin the step `name`, unless that is under way already."""
        if self._step.name == name:
            return
        self._end()
        for skipped in _ORDER[_ORDER.index(self._step.name) + 1 : _ORDER.index(name)]:
            self._step = Step(
                skipped,
                lines=["not asked: the address or the port is known"],
                facts={"asked": False},
            )
            self._end()
        self._step = Step(name)

    async def go(self, client: FederationClient) -> None:
        """Take the steps after the first."""
        self._client = client
        peer = client.peer(self._server, self._policy, _Leave(), self._told)
        try:
            with trio.fail_after(PROBE_S):
                async with peer:
                    await peer.connect()
                    self._enter("version")
                    self._version(await self._ask(peer, "/_matrix/federation/v1/version"))
                    self._enter("keys")
                    self._keys(await self._ask(peer, "/_matrix/key/v2/server"))
        except (Unreachable, SendFailed) as failure:
            if any(isinstance(each, ssl.SSLCertVerificationError) for each in causes(failure)):
                await self._look_at_refused()
            self.fail(failure.text)
        except _Unfit as unfit:
            self.fail(str(unfit))
        except trio.TooSlowError:
            self.fail(f"the probe is not done within {PROBE_S:g} s")
        except ProxyBroken as broken:
            self.fail(str(broken.strerror))
        except OutOfResources as lack:
            self.fail(f"this machine has no room for a connection: {lack.strerror}")
        else:
            self._end()

    # --- discovery, TCP and TLS -------------------------------------------------------------------

    def _told(self, stage: Stage) -> None:
        """Note a step of the client."""
        if self._step.name in ("version", "keys"):
            # The server closed the first connection after an answer; this is another one.
            return
        match stage:
            case AskWellKnown() | AskDns():
                self._question = stage
                self._enter(_step_of(stage))
            case Delegation():
                self._delegated(stage)
            case Lookup():
                self._looked_up(stage)
            case Resolved():
                self._place = stage
                self._found(stage)
            case Reached(address):
                self._reached = stage
                self.note(f"{address[0]} port {address[1]}")
                self.facts.update(ip=address[0], port=address[1])
                self._enter("TLS")
            case Connection():
                self._secured(stage)
                checks = self._policy.verify_certificates
                if not (self._config.federation.verify_certificates if checks is None else checks):
                    self.note("not checked: the configuration has verify_certificates: false")

    def _until(self, moment_s: float) -> tuple[bool, int]:
        """Whether the last answer is of the daemon's cache, and its end (ms since the epoch)."""
        assert self._client is not None
        cache, question = self._client.discovery.cache, self._question
        if isinstance(question, AskDns):
            cached = cache.from_file(question.name, question.rdtype)
        else:
            cached = question is not None and cache.from_file(question.host)
        until_ms = self._runtime.now_ms() + round((moment_s - trio.current_time()) * 1000)
        return cached, until_ms

    def _delegated(self, answer: Delegation) -> None:
        cached, until_ms = self._until(answer.refresh_at)
        found = f"none: {answer.text}" if answer.server is None else f"m.server is {answer.server}"
        holds = "from the cache, which has it until" if cached else "the next request is not before"
        self.note(f"{found}; {holds} {moment(until_ms)}")
        if answer.server is not None and answer.failures:
            self.note("the last request failed, and an earlier answer still holds")
        self.facts.update(
            server=answer.server, error=answer.text or None, cached=cached, until_ts=until_ms
        )

    def _looked_up(self, answer: Lookup) -> None:
        assert isinstance(self._question, AskDns)
        cached, until_ms = self._until(answer.expires_at)
        name, rdtype = self._question.name, self._question.rdtype
        said = f"; from the cache, which has it until {moment(until_ms)}" if cached else ""
        if rdtype == "SRV" and answer.values:
            self.note(f"{name}: {', '.join(answer.values)}{said}")
        elif rdtype == "SRV" or answer.failed or cached:
            found = f"{name}: {', '.join(answer.values)}" if answer.values else answer.text
            self.note(f"{found}{said}")
        lookups = self.facts.setdefault("lookups", [])
        assert isinstance(lookups, list)
        lookups.append(
            {
                "name": name,
                "type": rdtype,
                "values": list(answer.values),
                "error": answer.text or None,
                "cached": cached,
                "until_ts": until_ms,
            }
        )

    def _found(self, place: Resolved) -> None:
        self._enter("addresses")
        ranges = self._config.federation.ip_ranges
        judged: list[dict[str, object]] = []
        for ip, port in place.candidates:
            permitted, why = ranges.permit(ip), ranges.verdict(ip)
            if self._policy.address is not None:
                permitted, why = True, "the configuration gives it in destinations"
            self.note(f"{ip} port {port}: {'permitted' if permitted else 'forbidden'}: {why}")
            judged.append({"ip": ip, "port": port, "permitted": permitted, "why": why})
        self.facts.update(host=place.host_header, tls_name=place.tls_name, addresses=judged)
        if any(each["permitted"] for each in judged):
            self._enter("connection")

    def _secured(self, connection: Connection) -> None:
        """Note the version of TLS and the certificate of a connection."""
        stream = connection.stream
        if not isinstance(stream, TlsStream):
            return
        self.facts["version"] = stream.version
        try:
            certificate = x509.load_der_x509_certificate(stream.certificate)
            names = _names(certificate)
            issuer = words(certificate.issuer.rfc4514_string())
            life_ms = [
                int(each.timestamp() * 1000)
                for each in (certificate.not_valid_before_utc, certificate.not_valid_after_utc)
            ]
        except _UNREADABLE:
            self.note(f"{stream.version}; the certificate has parts that cannot be read")
            return
        left_ms = life_ms[1] - self._runtime.now_ms()
        days = int(left_ms / _DAY_MS)
        soon = 0 <= left_ms < min(_SOON_MS, (life_ms[1] - life_ms[0]) / 3)
        self.note(f"{stream.version}; certificate for {listed(names, _SHOWN) or 'no name'}")
        left = f"{many(days, 'day')} left" if left_ms >= 0 else "it has ended"
        warning = ": it ends soon" if soon else ""
        self.note(f"issued by {issuer}; good until {moment(life_ms[1])}, {left}{warning}")
        self.facts.update(
            names=names[:_SHOWN],
            issuer=issuer,
            not_before_ts=life_ms[0],
            not_after_ts=life_ms[1],
            days_left=days,
            ends_soon=soon,
        )

    async def _look_at_refused(self) -> None:
        """Note the certificate that was refused.

        OpenSSL does not keep it. So the same address is connected to once more, without a check;
        nothing is sent there.
        """
        assert self._client is not None
        if self._reached is None or self._place is None or self._step.name != "TLS":
            return
        looks_from = trio.current_time()
        unchecked = TlsPolicy(minimum=self._config.federation.minimum_tls_version, verify=False)
        with suppress(Unreachable, OutOfResources):
            connection = await self._client.dialer.open(
                [self._reached.address], self._place.tls_name, unchecked, IPRanges()
            )
            try:
                self._secured(connection)
            finally:
                connection.close()
        # The time of the step is that of the handshake that failed.
        self._began += trio.current_time() - looks_from

    # --- requests ---------------------------------------------------------------------------------

    async def _ask(self, peer: Peer, target: str) -> dict[str, Any]:
        """The JSON object at `target`; raises _Unfit, and as `Peer.get`."""
        within_s = self._policy.request_timeout or self._config.federation.request_timeout
        try:
            with trio.fail_after(within_s):
                response = await peer.get(target)
        except trio.TooSlowError:
            raise _Unfit(f"no answer to GET {target} within {within_s:g} s") from None
        if response.status != 200:
            answer = answer_of(response, (), reused=False, now_ms=self._runtime.now_ms)
            raise _Unfit(f"GET {target} was answered {response.status}: {answer.text or 'no text'}")
        document = json_object(response.body)
        if document is None:
            raise _Unfit(f"the answer to GET {target} is not a JSON object, or has too many parts")
        return document

    def _version(self, document: Mapping[str, Any]) -> None:
        server = document.get("server", {})
        found = (
            [server.get(key, "") for key in ("name", "version")]
            if isinstance(server, dict)
            else None
        )
        if found is None or not all(isinstance(each, str) for each in found):
            raise _Unfit("the answer has a field server that is not an object with texts")
        name, version = map(words, found)
        self.note(f"{name} {version}".strip() or "the server does not say what it runs")
        self.facts.update(name=name or None, version=version or None)

    def _keys(self, document: Mapping[str, Any]) -> None:
        name, keys = document.get("server_name"), document.get("verify_keys")
        until = document.get("valid_until_ts")
        if not isinstance(name, str) or name != self._server:
            raise _Unfit(f"the field server_name is {words(repr(name))}, not {self._server}")
        if not isinstance(keys, dict) or not keys:
            raise _Unfit("the field verify_keys has no keys")
        if type(until) is not int or not 0 <= until <= _LAST_MOMENT_MS:
            raise _Unfit("the field valid_until_ts is not a time in milliseconds")
        ids = [words(each) for each in sorted(keys)]
        self.note(f"{name}: {listed(ids, _SHOWN)}; valid until {moment(until)}")
        self.facts.update(server_name=name, key_ids=ids[:_SHOWN], valid_until_ts=until)
        if until < self._runtime.now_ms():
            raise _Unfit(f"the keys were valid until {moment(until)} only")


def _step_of(question: AskDns | AskWellKnown) -> StepName:
    if isinstance(question, AskWellKnown):
        return ".well-known"
    return "SRV" if question.rdtype == "SRV" else "addresses"


def _names(certificate: x509.Certificate) -> list[str]:
    """The host names and addresses that a certificate is for; raises as `cryptography` does."""
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    found = extension.value
    addresses = map(str, found.get_values_for_type(x509.IPAddress))
    return [words(name) for name in (*found.get_values_for_type(x509.DNSName), *addresses)]


class _Leave:
    """The permission that is always given: a probe is one attempt, beside those of the daemon."""

    hurried = False

    def at_once(self) -> bool:
        return True

    async def place(self) -> None: ...

    async def turn(self) -> None: ...

    async def handshake(self, address: str | None) -> None: ...

    def reached(self, address: str | None) -> None: ...

    def asked(self) -> None: ...
