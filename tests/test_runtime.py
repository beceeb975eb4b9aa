"""The real seams that no simulation covers: DNS over the wire, and looking at sockets."""

from contextlib import suppress
from pathlib import Path

import dns.flags
import dns.message
import dns.rrset
import pytest
import trio
import trio.testing
from tests.federation.servers import Zone, nameserver, no_descriptors

import fedsender.runtime
from fedsender.runtime import (
    NameNotFound,
    OutOfResources,
    RealNetwork,
    Records,
    RecordType,
    ResolveFailed,
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


@pytest.mark.parametrize(("records", "fits"), [(240, True), (4000, False)])
async def test_answers_of_the_dns_have_a_size(records: int, fits: bool) -> None:
    """64 KiB of records take 0.2 to 1 s of the loop to parse."""
    rows = [f"10.0.{number // 250}.{number % 250}" for number in range(records)]

    def reply_to(data: bytes) -> dns.message.Message:
        return dns.message.make_response(dns.message.from_wire(data))

    async def by_udp() -> None:
        while True:
            data, sender = await udp.recvfrom(65_535)
            reply = reply_to(data)
            reply.flags |= dns.flags.TC
            await udp.sendto(reply.to_wire(), sender)

    async def by_tcp(stream: trio.SocketStream) -> None:
        reply = reply_to((await stream.receive_some())[2:])
        reply.answer.append(dns.rrset.from_text_list(reply.question[0].name, 60, "IN", "A", rows))
        with suppress(trio.BrokenResourceError):
            await stream.send_all(reply.to_wire(prepend_length=True))

    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address = listener.socket.getsockname()
    with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as udp:
        await udp.bind(address)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(by_udp)
            nursery.start_soon(trio.serve_listeners, by_tcp, [listener])
            with trio.fail_after(60):
                if fits:
                    found = await RealNetwork().resolve("b.example", "A", [address])
                    assert set(found.values) == set(rows)
                else:
                    with pytest.raises(ResolveFailed, match="more than 4096 bytes"):
                        await RealNetwork().resolve("b.example", "A", [address])
            nursery.cancel_scope.cancel()


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
            hosts.unlink()
            assert (await network.resolve("b.example", "A", [address])).values == ("192.0.2.1",)
