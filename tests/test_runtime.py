"""The real seams that no simulation covers: DNS over the wire, and looking at sockets."""

import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random

import dns.exception
import dns.flags
import dns.message
import dns.resolver
import dns.rrset
import pytest
import trio
import trio.testing
from tests.federation.servers import Zone, nameserver, no_descriptors
from tests.garbage import left_of, no_search_for_cycles

import fedsender.runtime
from fedsender.runtime import (
    MAX_DNS_LABELS,
    NameNotFound,
    OutOfResources,
    RealNetwork,
    Records,
    RecordType,
    ResolveFailed,
    check_dns_answer,
    real_runtime,
)

ZONE: Zone = {
    ("b.example", "A"): (600, "192.0.2.1"),
    ("b.example", "AAAA"): (500, "2001:db8::1"),
    ("_matrix-fed._tcp.b.example", "SRV"): (60, "1 2 8448 m.x."),
}


@pytest.mark.parametrize(
    ("name", "rdtype", "records"),
    [
        ("b.example", "A", Records(("192.0.2.1",), 600)),
        ("b.example", "AAAA", Records(("2001:db8::1",), 500)),
        ("_matrix-fed._tcp.b.example", "SRV", Records(("1 2 8448 m.x.",), 60)),
    ],
)
async def test_records_come_with_their_life(
    name: str, rdtype: RecordType, records: Records
) -> None:
    async with nameserver(ZONE) as address:
        with trio.fail_after(60):
            assert await RealNetwork().resolve(name, rdtype, [address]) == records


@pytest.mark.parametrize(
    ("name", "rdtype", "ttl_s"),
    [
        ("gone.example", "A", 300),
        ("b.example", "SRV", 300),
        ("x" * 64 + ".example", "A", 3600),
        ("a..example", "A", 3600),
    ],
)
async def test_absence_is_an_answer_with_a_life(
    name: str, rdtype: RecordType, ttl_s: float
) -> None:
    async with nameserver(ZONE) as address:
        with trio.fail_after(60), pytest.raises(NameNotFound) as caught:
            await RealNetwork().resolve(name, rdtype, [address])
        assert caught.value.ttl_s == ttl_s


async def test_server_that_cannot_help_is_a_failure() -> None:
    async with nameserver(ZONE) as address:
        with trio.fail_after(60), pytest.raises(ResolveFailed, match=r"broken\.example A"):
            await RealNetwork().resolve("broken.example", "A", [address])


def addresses(name: str, count: int) -> dns.rrset.RRset:
    rows = [f"10.0.{number // 250}.{number % 250}" for number in range(count)]
    return dns.rrset.from_text_list(name, 60, "IN", "A", rows)


@asynccontextmanager
async def dns_server(
    by_udp: Callable[[bytes], Iterable[bytes]], by_tcp: Callable[[bytes], bytes]
) -> AsyncIterator[tuple[str, int]]:
    """One that sends what these make of a question, by TCP with its length before it; the address.

    The body has a minute.
    """

    async def serve_udp() -> None:
        while True:
            data, sender = await udp.recvfrom(65_535)
            for datagram in by_udp(data):
                await udp.sendto(datagram, sender)

    async def serve_tcp(stream: trio.SocketStream) -> None:
        answer = by_tcp((await stream.receive_some())[2:])
        with suppress(trio.BrokenResourceError):
            await stream.send_all(len(answer).to_bytes(2, "big") + answer)

    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address = listener.socket.getsockname()
    with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as udp:
        await udp.bind(address)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_udp)
            nursery.start_soon(trio.serve_listeners, serve_tcp, [listener])
            with trio.fail_after(60):
                yield address
            nursery.cancel_scope.cancel()


LONG = "a." * 110 + "b.example."


@pytest.mark.parametrize("by_udp", [True, False])
@pytest.mark.parametrize(
    ("answer", "refusal"),
    [
        ([addresses("b.example.", 40)], None),
        ([addresses("b.example.", 41)], "more than 40 records"),
        ([addresses("b.example.", 2000)], "more than 4096 bytes"),
        (
            [dns.rrset.from_text("b.example.", 60, "IN", "CNAME", LONG), addresses(LONG, 30)],
            "more than 512 labels",
        ),
        (
            [dns.rrset.from_text("b.example.", 60, "IN", "NSEC", "c.example. A")],
            "a record of type 47",
        ),
    ],
)
async def test_a_dns_answer_that_is_dear_to_read_is_not_read(
    answer: list[dns.rrset.RRset], refusal: str | None, by_udp: bool
) -> None:
    """Each of these with 4 KiB took dnspython up to 435 ms of the loop."""

    def reply_to(data: bytes, *, cut: bool = False) -> bytes:
        reply = dns.message.make_response(dns.message.from_wire(data))
        reply.answer = [] if cut else answer
        reply.flags |= dns.flags.TC if cut else 0
        return reply.to_wire()

    def datagrams(data: bytes) -> list[bytes]:
        # What was not asked for comes from whoever guesses the port.
        return [b"no id of ours", reply_to(data, cut=not by_udp)]

    async with dns_server(datagrams, reply_to) as address:
        if refusal is None:
            found = await RealNetwork().resolve("b.example", "A", [address])
            assert len(found.values) == 40
        else:
            with pytest.raises(ResolveFailed, match=refusal):
                await RealNetwork().resolve("b.example", "A", [address])


@pytest.mark.parametrize("count", [40, 41])
async def test_a_question_that_fails_leaves_nothing_behind(count: int) -> None:
    """Dead names are asked for daily."""

    def truncated(data: bytes) -> list[bytes]:
        reply = dns.message.make_response(dns.message.from_wire(data))
        reply.flags |= dns.flags.TC
        return [reply.to_wire()]

    def by_tcp(data: bytes) -> bytes:
        reply = dns.message.make_response(dns.message.from_wire(data))
        reply.answer = [addresses("b.example.", count)]
        return reply.to_wire()

    async with dns_server(truncated, by_tcp) as address:
        with no_search_for_cycles():
            with suppress(ResolveFailed):
                await RealNetwork().resolve("b.example", "A", [address])
            assert not left_of(dns.resolver._Resolution)


@pytest.mark.parametrize("kept", [12, 40, 500])
async def test_a_truncated_dns_answer_is_asked_for_by_tcp_wherever_it_was_cut(kept: int) -> None:
    """Some forwarders cut within a record; and what is left may be more than we would read."""

    def reply_to(data: bytes) -> bytes:
        reply = dns.message.make_response(dns.message.from_wire(data))
        reply.answer = [addresses("b.example.", 40)]
        return reply.to_wire()

    def cut(data: bytes) -> list[bytes]:
        answer = bytearray(reply_to(data))
        answer[2] |= 2
        return [bytes(answer[:kept])]

    async with dns_server(cut, reply_to) as address:
        found = await RealNetwork().resolve("b.example", "A", [address])
    assert len(found.values) == 40


@pytest.mark.slow
def test_what_passes_for_a_dns_answer_ends_soon_and_is_cheap_to_read() -> None:
    """Of answers with bytes changed, cut off or added, by a seed."""
    random = Random(7)
    question = dns.message.make_query("b.example.", "SRV")
    whole = dns.message.make_response(question)
    names = [f"{'x.' * count}b.example." for count in range(12)]
    rows = [f"1 2 8448 {name}" for name in names]
    whole.answer = [dns.rrset.from_text_list("b.example.", 60, "IN", "SRV", rows)]
    answer = whole.to_wire()
    passed = 0
    for _ in range(1000):
        wire = bytearray(answer)
        for _ in range(random.randrange(4)):
            wire[random.randrange(12, len(wire))] = random.choice((0, 1, 63, 64, 192, 193, 255))
        del wire[random.choice((len(wire), random.randrange(len(wire)))) :]
        try:
            check_dns_answer(bytes(wire))
        except OSError:
            continue
        passed += 1
        with suppress(dns.exception.DNSException):
            read = dns.message.from_wire(bytes(wire), ignore_trailing=True)
            targets = [str(getattr(row, "target", "")) for rrset in read.answer for row in rrset]
            assert sum(target.count(".") for target in targets) <= MAX_DNS_LABELS
    assert 100 < passed < 900


async def test_our_own_lack_of_descriptors_is_nobodys_refusal() -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    async with listener, nameserver({}) as server:
        with no_descriptors():
            with pytest.raises(OutOfResources, match="Too many open files"):
                await RealNetwork().open_tcp("127.0.0.1", port)
            with pytest.raises(OutOfResources, match="Too many open files"):
                await RealNetwork().resolve("b.example.", "A", [server])
        await trio.aclose_forcefully(await RealNetwork().open_tcp("127.0.0.1", port))


async def test_hosts_file_goes_before_the_dns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(
        "# names\n10.0.0.9 B.example other # here\n::9 b.example\nnonsense b.example\n"
    )
    monkeypatch.setattr(fedsender.runtime, "_HOSTS_FILE", hosts)
    async with nameserver(ZONE) as address:
        network = RealNetwork()
        with trio.fail_after(60):
            assert (await network.resolve("b.example", "A", [address])).values == ("10.0.0.9",)
            assert (await network.resolve("b.example", "AAAA", [address])).values == ("::9",)
            # Whether the DNS answers or not: without this an address that is known is of no use.
            with pytest.raises(NameNotFound, match=r"other: no AAAA in .*hosts"):
                await network.resolve("other", "AAAA", [("127.0.0.1", 1)])
            hosts.unlink()
            assert (await network.resolve("b.example", "A", [address])).values == ("192.0.2.1",)


def test_elapsed_time_goes_on_while_the_machine_is_suspended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lease ends meanwhile: others have taken it."""
    clocks = {time.CLOCK_BOOTTIME: 42.0, time.CLOCK_MONOTONIC: 7.0}
    monkeypatch.setattr(time, "clock_gettime", clocks.__getitem__)
    monkeypatch.setattr(time, "monotonic", lambda: 7.0)
    assert real_runtime().elapsed_s() == 42.0
