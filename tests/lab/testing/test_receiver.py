"""The receiving servers: what keeps the rules is taken, and every broken rule is noticed."""

import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from canonicaljson import encode_canonical_json
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from signedjson.key import decode_signing_key_base64
from signedjson.sign import sign_json
from unpaddedbase64 import encode_base64

from fedsender_lab.testing.http import Request
from fedsender_lab.testing.receiver import (
    DOWN,
    STALLING,
    VERSION,
    Behaviour,
    Receivers,
    ReceivingServer,
    busy,
    failing,
    garbage,
    healthy,
    open_receivers,
    refusing,
)
from fedsender_lab.testing.rules import SEND, Origin, ReceivedPdu

ORIGIN = "hs.example"
KEY = Ed25519PrivateKey.from_private_bytes(b"s" * 32)


def read_pdu(event: Mapping[str, Any]) -> ReceivedPdu:
    """PDUs of these tests are named by their depth."""
    return ReceivedPdu(f"${event['depth']}", "!r", "m.room.message", whole=True)


@asynccontextmanager
async def receiving(tmp_path: Path, behaviour: Behaviour) -> AsyncIterator[ReceivingServer]:
    """One server; its `Receivers` stand in its `_peers`."""
    origin = Origin(ORIGIN, {"ed25519:1": KEY.public_key()})
    async with open_receivers(
        1, [origin], read_pdu, directory=tmp_path, now_ms=_now_ms(), behaviours={0: behaviour}
    ) as receivers:
        (server,) = receivers.servers.values()
        yield server


def _now_ms() -> int:
    # Certificates are checked against the machine's own clock.
    return time.time_ns() // 1_000_000


def peers(server: ReceivingServer) -> Receivers:
    return server._peers


def rules_broken(server: ReceivingServer) -> dict[str, int]:
    return dict(peers(server).violations.counts)


def body_of(*depths: int, **more: Any) -> bytes:
    pdus = [{"content": {}, "depth": depth, "type": "m.room.message"} for depth in depths]
    transaction = {"origin": ORIGIN, "origin_server_ts": 1, "pdus": pdus, **more}
    return encode_canonical_json(transaction)


def header(server: str, uri: str, body: bytes, **changed: str) -> str:
    """The Authorization header, made with the reference library and not with ours."""
    key = decode_signing_key_base64("ed25519", "1", encode_base64(b"s" * 32))
    request = {
        "method": "PUT",
        "uri": uri,
        "origin": ORIGIN,
        "destination": server,
        "content": json.loads(body),
    }
    signature = sign_json(request, ORIGIN, key)["signatures"][ORIGIN]["ed25519:1"]
    fields = {"origin": ORIGIN, "key": "ed25519:1", "sig": signature, "destination": server}
    return "X-Matrix " + ",".join(f'{key}="{value}"' for key, value in (fields | changed).items())


class Client:
    """One connection of a sender, spoken by hand so that it can break every rule."""

    def __init__(self, server: ReceivingServer, stream: trio.SSLStream[trio.SocketStream]) -> None:
        self.server = server
        self.stream = stream

    async def write(self, transaction: str, body: bytes, **changed: str) -> None:
        uri = SEND + transaction
        authorization = header(self.server.name, uri, body, **changed)
        head = (
            f"PUT {uri} HTTP/1.1\r\nHost: {self.server.name}\r\n"
            f"Authorization: {authorization}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        await self.stream.send_all(head.encode() + body)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        received = b""
        while b"\r\n\r\n" not in received:
            received += await self._more()
        head, _, body = received.partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (x.partition(": ") for x in lines)}
        while len(body) < int(headers["content-length"]):
            body += await self._more()
        return int(status.split()[1]), headers, body

    async def _more(self) -> bytes:
        piece = bytes(await self.stream.receive_some())
        if not piece:
            raise EOFError
        return piece

    async def put(self, transaction: str, body: bytes, **changed: str) -> int:
        await self.write(transaction, body, **changed)
        return (await self.answer())[0]


@asynccontextmanager
async def connected(server: ReceivingServer) -> AsyncIterator[Client]:
    host, _, port = server.name.partition(":")
    context = ssl.create_default_context(cafile=peers(server).ca_file)
    with trio.fail_after(60):
        tcp = await trio.open_tcp_stream(host, int(port))
        stream = trio.SSLStream(tcp, context, server_hostname=host, https_compatible=True)
        try:
            yield Client(server, stream)
        finally:
            await trio.aclose_forcefully(stream)


async def test_a_transaction_that_keeps_the_rules_is_received(tmp_path: Path) -> None:
    async with receiving(tmp_path, healthy()) as server, connected(server) as client:
        await client.write("t1", body_of(1, 2, edus=[{"content": {}, "edu_type": "m.typing"}]))
        status, _, answer = await client.answer()

    assert status == 200
    assert json.loads(answer) == {"pdus": {"$1": {}, "$2": {}}}
    assert list(server.received) == ["$1", "$2"]
    (transaction,) = server.transactions
    assert transaction.edu_types == ("m.typing",)
    assert transaction.transaction_id == "t1"
    assert not rules_broken(server)


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"sig": "AAAA"}, "signature"),
        ({"key": "ed25519:other"}, "signature"),
        ({"destination": "elsewhere.example"}, "authorization"),
        ({"origin": "stranger.example"}, "authorization"),
    ],
)
async def test_a_request_that_its_origin_did_not_sign_for_this_server_is_refused(
    tmp_path: Path, changed: dict[str, str], rule: str
) -> None:
    async with receiving(tmp_path, healthy()) as server, connected(server) as client:
        assert await client.put("t1", body_of(1), **changed) == 401

    assert rules_broken(server) == {rule: 1}
    assert not server.received


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        (body_of(*range(51)), "limits"),
        (body_of(edus=[{"content": {}, "edu_type": "m.x"}] * 101), "limits"),
        (body_of(1).replace(b'"pdus"', b' "pdus"'), "canonical form"),
        (body_of(1, origin="stranger.example"), "body"),
        (encode_canonical_json({"origin": ORIGIN, "origin_server_ts": 1, "edus": []}), "body"),
        (
            encode_canonical_json(
                {
                    "origin": ORIGIN,
                    "origin_server_ts": 1,
                    "pdus": [{"depth": 1, "unsigned": {"age_ts": 5}}],
                }
            ),
            "pdu",
        ),
    ],
)
async def test_a_body_that_breaks_a_rule_is_refused(tmp_path: Path, body: bytes, rule: str) -> None:
    async with receiving(tmp_path, healthy()) as server, connected(server) as client:
        uri = SEND + "t1"
        # Signed as it stands: a body that is not canonical would otherwise fail by its signature.
        signed = {"sig": _signature_of(server.name, uri, body)}
        assert await client.put("t1", body, **signed) == 400

    assert rules_broken(server) == {rule: 1}


def _signature_of(server: str, uri: str, body: bytes) -> str:
    text = (
        b'{"content":'
        + body
        + f',"destination":"{server}","method":"PUT","origin":"{ORIGIN}","uri":"{uri}"}}'.encode()
    )
    return str(encode_base64(KEY.sign(text)))


async def test_two_transactions_at_once_are_an_overlap(tmp_path: Path) -> None:
    async with (
        receiving(tmp_path, healthy(latency=0.2)) as server,
        connected(server) as one,
        connected(server) as other,
    ):
        await one.write("t1", body_of(1))
        await other.write("t2", body_of(2))
        await one.answer()
        await other.answer()

    assert rules_broken(server) == {"overlap": 1}


async def test_one_after_the_other_is_no_overlap_on_any_connection(tmp_path: Path) -> None:
    async with (
        receiving(tmp_path, healthy(latency=0.01)) as server,
        connected(server) as one,
        connected(server) as other,
    ):
        for number, client in enumerate([one, one, other, one]):
            assert await client.put(f"t{number}", body_of(number)) == 200

    assert not rules_broken(server)
    assert len(server.received) == 4


async def test_after_a_failure_the_same_transaction_must_come_and_not_at_once(
    tmp_path: Path,
) -> None:
    async with receiving(tmp_path, failing()) as server, connected(server) as client:
        assert await client.put("t1", body_of(1)) == 500
        server.become(healthy())
        assert await client.put("t2", body_of(2)) == 400

    assert rules_broken(server) == {"too soon": 1, "another id before an answer": 1}


async def test_a_woken_origin_may_come_at_once_but_with_the_same_transaction(
    tmp_path: Path,
) -> None:
    async with receiving(tmp_path, failing()) as server, connected(server) as client:
        assert await client.put("t1", body_of(1)) == 500
        server.become(healthy())
        server.origin_woken(ORIGIN)
        assert await client.put("t1", body_of(1)) == 200

    assert not rules_broken(server)
    assert list(server.received) == ["$1"]


async def test_one_id_is_one_body(tmp_path: Path) -> None:
    async with receiving(tmp_path, healthy()) as server, connected(server) as client:
        assert await client.put("t1", body_of(1)) == 200
        assert await client.put("t1", body_of(2)) == 400

    assert rules_broken(server) == {"same id, other body": 1}


async def test_a_killed_origin_may_forget_a_first_attempt_but_no_second(tmp_path: Path) -> None:
    async with receiving(tmp_path, failing()) as server, connected(server) as client:
        await client.put("t1", body_of(1))
        server.origin_killed(ORIGIN)
        await client.put("t2", body_of(1))
        server.origin_woken(ORIGIN)
        await client.put("t2", body_of(1))
        server.origin_killed(ORIGIN)
        await client.put("t3", body_of(1))

    assert rules_broken(server) == {"another id before an answer": 1}


async def test_after_a_refusal_other_content_may_be_tried(tmp_path: Path) -> None:
    # A sender looks for the item at fault: with a part of the content, under another id.
    async with receiving(tmp_path, refusing(403)) as server, connected(server) as client:
        assert await client.put("t1", body_of(1, 2)) == 403
        server.origin_woken(ORIGIN)
        assert await client.put("t2", body_of(1)) == 403

    assert not rules_broken(server)


async def test_a_repeat_gets_the_same_answer_and_counts_once(tmp_path: Path) -> None:
    async with receiving(tmp_path, healthy()) as server, connected(server) as client:
        assert await client.put("t1", body_of(1)) == 200
        assert await client.put("t1", body_of(1)) == 200

    assert server.counts["repeats"] == 1
    assert server.counts["repeated_pdus"] == 1
    assert list(server.received) == ["$1"]
    assert not rules_broken(server)


async def test_a_server_that_is_down_refuses_and_comes_back_at_its_port(tmp_path: Path) -> None:
    async with receiving(tmp_path, healthy()) as server:
        async with connected(server) as client:
            assert await client.put("t1", body_of(1)) == 200
            server.become(DOWN)
            await server.settled()
            with pytest.raises((EOFError, trio.BrokenResourceError)):
                await client.put("t2", body_of(2))
        with pytest.raises(OSError, match="all attempts to connect"):
            async with connected(server):
                pass
        server.become(healthy())
        await server.settled()
        async with connected(server) as client:
            assert await client.put("t2", body_of(2)) == 200

    assert list(server.received) == ["$1", "$2"]
    assert not rules_broken(server)


async def test_a_server_that_goes_down_answers_nothing_that_it_did_not_take_in(
    tmp_path: Path,
) -> None:
    # Its open connections outlive the change by a moment; a 200 then would be a lie.
    async with receiving(tmp_path, healthy()) as server:
        body = body_of(1)
        request = Request(0, "PUT", SEND + "t1", body=bytearray(body), complete=True)
        request.headers["authorization"] = header(server.name, request.target, body)
        request.headers["content-type"] = "application/json"
        server.request_began(request)
        server.become(DOWN)

        assert server.reply_to(request).status is None
        assert not request.processed


async def test_a_stalling_server_takes_nothing_in_and_sees_the_client_leave(
    tmp_path: Path,
) -> None:
    async with receiving(tmp_path, STALLING) as server:
        arrived = trio.Event()
        peers(server).on_transaction = lambda _: arrived.set()
        async with connected(server) as client:
            await client.write("t1", body_of(1))
            with trio.move_on_after(0.05):
                await client.answer()
        await arrived.wait()
        (attempt,) = server.transactions
        assert attempt.status is None
        assert not server.received

        server.become(healthy())
        async with connected(server) as client:
            assert await client.put("t1", body_of(1)) == 200

    assert list(server.received) == ["$1"]
    assert not rules_broken(server)


async def test_a_request_cut_off_in_its_body_is_an_attempt_that_failed(tmp_path: Path) -> None:
    async with receiving(tmp_path, healthy()) as server:
        async with connected(server) as client:
            await client.write("t1", body_of(1))
            await client.answer()
            await client.stream.send_all(
                f"PUT {SEND}t2 HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n".encode()
                + f"Authorization: {header(server.name, SEND + 't2', b'{}')}\r\n\r\n".encode()
                + b"half"
            )
        async with connected(server) as client:
            while not server._correspondences[ORIGIN].failure:
                await trio.testing.wait_all_tasks_blocked()
            assert await client.put("t3", body_of(3)) == 400

    assert rules_broken(server) == {"another id before an answer": 1}


@pytest.mark.parametrize(
    ("behaviour", "status"), [(busy(retry_after=7), 429), (failing(502), 502), (garbage(), 200)]
)
async def test_what_gets_no_proper_answer_is_not_received(
    tmp_path: Path, behaviour: Behaviour, status: int
) -> None:
    async with receiving(tmp_path, behaviour) as server, connected(server) as client:
        await client.write("t1", body_of(1))
        answered, headers, _ = await client.answer()

    assert answered == status
    assert headers.get("retry-after") == ("7" if status == 429 else None)
    assert not server.received
    assert not rules_broken(server)


async def test_the_version_is_told_and_other_paths_are_not_known(tmp_path: Path) -> None:
    async with receiving(tmp_path, failing()) as server, connected(server) as client:
        for path, status in ((VERSION, 200), ("/", 404)):
            await client.stream.send_all(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert (await client.answer())[0] == status


async def test_only_who_trusts_the_authority_can_connect(tmp_path: Path) -> None:
    async with receiving(tmp_path, healthy()) as server:
        host, _, port = server.name.partition(":")
        tcp = await trio.open_tcp_stream(host, int(port))
        stream = trio.SSLStream(tcp, ssl.create_default_context(), server_hostname=host)
        with pytest.raises(trio.BrokenResourceError):
            await stream.do_handshake()
        await trio.aclose_forcefully(stream)


@pytest.mark.parametrize(("asked", "broken"), [(False, 1), (True, 0)])
async def test_after_two_silent_ends_parts_are_tried_by_who_asked_for_our_version(
    tmp_path: Path, asked: bool, broken: int
) -> None:
    """A sender looks for the item that makes a server fall silent."""
    async with receiving(tmp_path, STALLING) as server:
        for _ in range(2):
            await _put_in_vain(server, "t1", body_of(1, 2))
        if asked:
            server.reply_to(Request(0, "GET", VERSION, complete=True))
        await _put_in_vain(server, "t2", body_of(1))
        assert rules_broken(server).get("another id before an answer", 0) == broken
        if not asked:
            return
        # A step that fails is followed by another step, until what is suspected has been answered.
        await _put_in_vain(server, "t3", body_of(3))
        server.become(healthy())
        async with connected(server) as client:
            await client.put("t4", body_of(1))
            await client.put("t5", body_of(2))
        server.become(STALLING)
        await _put_in_vain(server, "t6", body_of(4))
        assert not rules_broken(server)
        await _put_in_vain(server, "t7", body_of(5))

    assert rules_broken(server) == {"another id before an answer": 1}


async def _put_in_vain(server: ReceivingServer, transaction: str, body: bytes) -> None:
    ended = trio.Event()
    peers(server).on_transaction = lambda _: ended.set()
    async with connected(server) as client:
        await client.write(transaction, body)
        with trio.move_on_after(0.05) as patience:
            await client.answer()
    if patience.cancelled_caught:
        await ended.wait()
