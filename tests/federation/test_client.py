"""Peers and the connections they leave behind, over real TLS where TLS matters."""

import json
import math
import re
import socket
import ssl
from base64 import b64decode
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import signedjson.key
import signedjson.sign
import trio
import trio.testing
from tests.federation.servers import (
    BODY,
    KEY_RING,
    NAME,
    OK,
    OURS,
    AnybodyMay,
    Authority,
    Conversation,
    Rows,
    TableNetwork,
    Zone,
    answering,
    client_of,
    nameserver,
    no_descriptors,
    no_stream_left,
    one_server,
    read_request,
    response,
    runtime_with,
    saving_client,
    send,
    serving,
)

from fedsender.config import Federation, Policy
from fedsender.config.values import TcpAddress
from fedsender.fairness import Payer, Payers, Turns
from fedsender.federation.client import (
    SendFailed,
    Stale,
    Unreachable,
    open_client,
)
from fedsender.federation.signing import signing_key_from_seed
from fedsender.runtime import OutOfResources, RealNetwork
from fedsender.telemetry import Metrics
from fedsender_lab.testing.http import Request


def noting(requests: list[Request], *answers: bytes) -> Conversation:
    """Like `answering`, keeping what was asked."""

    async def converse(stream: trio.abc.Stream) -> None:
        remaining = list(answers)
        while (request := await read_request(stream)) is not None:
            requests.append(request)
            await stream.send_all(remaining[0])
            if len(remaining) > 1:
                remaining.pop(0)

    return converse


def verify(request: Request, key_id: str = "ed25519:a_1", seed: bytes = bytes(range(32))) -> None:
    """Check the X-Matrix header as a receiver does."""
    fields = dict(re.findall(r'(\w+)="([^"]*)"', request.headers["authorization"]))
    assert fields["key"] == key_id
    signed = {
        "method": "PUT",
        "uri": request.line.split()[1],
        "origin": fields["origin"],
        "destination": fields["destination"],
        "content": json.loads(request.body),
        "signatures": {fields["origin"]: {key_id: fields["sig"]}},
    }
    public = signing_key_from_seed("x", seed).public_key()
    verify_key = signedjson.key.decode_verify_key_bytes(key_id, b64decode(public + "="))
    signedjson.sign.verify_signed_json(signed, fields["origin"], verify_key)


# --- what is sent ---------------------------------------------------------------------------------


async def test_transaction_arrives_signed_and_its_answer_comes_back(tmp_path: Path) -> None:
    requests: list[Request] = []
    async with (
        one_server(tmp_path, noting(requests, OK)) as (client, server),
        client.peer(NAME, server.policy, AnybodyMay()) as peer,
    ):
        answer = await send(peer, "0f.1")
    assert (answer.status, answer.is_answer, answer.reused) == (200, True, False)
    request = requests[0]
    assert request.line == "PUT /_matrix/federation/v1/send/0f.1 HTTP/1.1"
    assert request.body == BODY
    assert request.headers["host"] == NAME
    assert request.headers["content-type"] == "application/json"
    assert request.headers["user-agent"].startswith("fedsender/")
    assert request.headers["accept-encoding"] == "identity"
    verify(request)


async def test_each_attempt_is_signed_with_the_key_of_the_moment(tmp_path: Path) -> None:
    requests: list[Request] = []
    async with (
        one_server(tmp_path, noting(requests, OK)) as (client, server),
        client.peer(NAME, server.policy, AnybodyMay()) as peer,
    ):
        await send(peer)
        assert client.keys is not None
        client.keys.keys = (signing_key_from_seed("new", bytes(32)),)
        await send(peer)
    verify(requests[0])
    verify(requests[1], "ed25519:new", bytes(32))
    assert server.connections == 1


async def test_connection_outlives_the_peer_and_serves_the_next(tmp_path: Path) -> None:
    async with one_server(tmp_path, answering(OK)) as (client, server):
        for reused in (False, True, True):
            async with client.peer(NAME, server.policy, AnybodyMay()) as peer:
                assert (await send(peer)).reused is reused
        assert server.connections == 1
        assert client.connections.idle == client.connections.open == 1
    assert server.left == 1


async def test_entering_and_leaving_a_peer_does_nothing(tmp_path: Path) -> None:
    async with one_server(tmp_path, answering(OK)) as (client, server):
        async with client.peer(NAME, server.policy, AnybodyMay()):
            pass
        async with client.peer("not a server name", Policy(), AnybodyMay()) as peer:
            with pytest.raises(Unreachable, match="not a server name"):
                await peer.connect()
    assert server.connections == 0


async def test_connections_are_not_shared_between_destinations(tmp_path: Path) -> None:
    """One web host may serve many servers, and its certificate not name them all."""
    authority = Authority(tmp_path)
    async with (
        serving(authority.context("b.example", "c.example"), answering(OK)) as server,
        client_of(tmp_path) as client,
    ):
        for name in ("b.example", "c.example"):
            async with client.peer(name, server.policy, AnybodyMay()) as peer:
                await send(peer)
        async with client.peer("evil.example", server.policy, AnybodyMay()) as peer:
            with pytest.raises(Unreachable, match="certificate refused") as caught:
                await peer.connect()
            assert caught.value.kind == "tls"
    assert server.connections == 3


async def test_changed_policy_does_not_use_the_connection_of_the_old_one(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    context = authority.context(NAME)
    async with (
        serving(context, answering(OK)) as old,
        serving(context, answering(OK)) as new,
        client_of(tmp_path) as client,
    ):
        for server in (old, new, new):
            async with client.peer(NAME, server.policy, AnybodyMay()) as peer:
                await send(peer)
        assert (old.connections, new.connections) == (1, 1)
        assert client.connections.open == 1


async def test_answers_of_any_status_are_answers(tmp_path: Path) -> None:
    answers = [
        response(429, b'{"errcode":"M_LIMIT_EXCEEDED","error":"slow"}', "Retry-After: 9"),
        response(302, b"", "Location: https://elsewhere.example/"),
        response(200, b"<html>"),
        response(500, b""),
        OK,
    ]
    async with (
        one_server(tmp_path, answering(*answers)) as (client, server),
        client.peer(NAME, server.policy, AnybodyMay()) as peer,
    ):
        limited = await send(peer)
        assert (limited.status, limited.retry_after_s) == (429, 9.0)
        assert limited.text == "M_LIMIT_EXCEEDED: slow"
        assert [(await send(peer)).status for _ in range(4)] == [302, 200, 500, 200]
    assert server.connections == 1


async def test_longest_answer_that_is_read_depends_on_the_pdus_sent(tmp_path: Path) -> None:
    sent = [f"${n}" for n in range(50)]
    page = b'{"pdus":{},"x":"' + b"x" * 200_000 + b'"}'
    async with (
        one_server(tmp_path, answering(response(200, page))) as (client, server),
        client.peer(NAME, server.policy, AnybodyMay()) as peer,
    ):
        assert (await send(peer, event_ids=sent)).is_answer
        with pytest.raises(SendFailed, match="larger than 86016 bytes") as caught:
            await send(peer, event_ids=sent[:5])
        assert (caught.value.kind, caught.value.sent) == ("too_large", True)


# --- reused connections that are closed -----------------------------------------------------------


VERSION = response(200, b'{"server":{"name":"x"}}')


def closing_after(answers: int, requests: list[Request]) -> Conversation:
    """Answers so often, then reads one more request and closes without a word."""

    async def converse(stream: trio.abc.Stream) -> None:
        for _ in range(answers):
            request = await read_request(stream)
            if request is None:
                return
            requests.append(request)
            await stream.send_all(VERSION if request.line.startswith("GET ") else OK)
        request = await read_request(stream)
        if request is not None:
            requests.append(request)

    return converse


async def test_reused_connection_that_closes_unheard_is_stale(tmp_path: Path) -> None:
    requests: list[Request] = []
    async with (
        one_server(tmp_path, closing_after(1, requests)) as (client, server),
        client.peer(NAME, server.policy, AnybodyMay()) as peer,
    ):
        assert not (await send(peer, "t1")).reused
        with pytest.raises(Stale) as caught:
            await send(peer, "t2")
        assert caught.value.sent
        answer = await send(peer, "t2")
    assert (answer.status, answer.reused) == (200, False)
    assert [request.line.split("/")[-2].split()[0] for request in requests] == ["t1", "t2", "t2"]
    assert server.connections == 2


async def test_a_doubted_place_is_looked_for_over_a_new_connection(tmp_path: Path) -> None:
    requests: list[Request] = []
    async with (
        one_server(tmp_path, noting(requests, OK)) as (client, server),
        client.peer(NAME, server.policy, AnybodyMay()) as peer,
    ):
        await send(peer, "t1")
        peer.doubt()
        assert not (await send(peer, "t2")).reused
    assert server.connections == 2


async def test_a_question_on_a_stale_connection_is_asked_again(tmp_path: Path) -> None:
    """A server that closes after each answer is no server that does not answer."""
    requests: list[Request] = []
    async with (
        one_server(tmp_path, closing_after(1, requests)) as (client, server),
        client.peer(NAME, server.policy, AnybodyMay()) as peer,
    ):
        await send(peer)
        assert await peer.version_answers()
        assert await peer.version_answers()
    assert server.connections == 3
    assert [request.line.split()[0] for request in requests] == ["PUT", "GET", "GET", "GET", "GET"]


async def test_new_connection_that_closes_unheard_is_a_failure(tmp_path: Path) -> None:
    requests: list[Request] = []
    async with (
        one_server(tmp_path, closing_after(0, requests)) as (client, server),
        client.peer(NAME, server.policy, AnybodyMay()) as peer,
    ):
        with pytest.raises(SendFailed, match="without an answer") as caught:
            await send(peer)
        assert (caught.value.kind, caught.value.sent) == ("closed", True)
        # The next attempt gets a connection of its own.
        with pytest.raises(SendFailed):
            await send(peer)
    assert len(requests) == server.connections == 2
    assert client.connections.open == 0


async def test_answer_that_breaks_off_is_not_repeated(tmp_path: Path) -> None:
    half = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{"
    converse = answering(OK, half, then_close=True)
    async with (
        one_server(tmp_path, converse) as (client, server),
        client.peer(NAME, server.policy, AnybodyMay()) as peer,
    ):
        await send(peer)
        with pytest.raises(SendFailed, match="in the middle") as caught:
            await send(peer)
        assert caught.value.sent
    assert server.connections == 1


def unused_port() -> int:
    """A port of loopback nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def test_cancelled_exchange_says_what_left_and_spoils_no_later_one(tmp_path: Path) -> None:
    async def converse(stream: trio.abc.Stream) -> None:
        await read_request(stream)
        if server.connections == 1:
            await trio.sleep_forever()
        await stream.send_all(OK)

    async with (
        one_server(tmp_path, converse) as (client, server),
        client.peer(NAME, server.policy, AnybodyMay()) as peer,
    ):
        assert not peer.at_hand()
        await peer.connect()
        assert not peer.sent
        with trio.move_on_after(0.2):
            await peer.put_transaction("t1", BODY, ())
        assert peer.sent
        assert not peer.at_hand()
        assert not peer.sent
        assert (await send(peer)).status == 200


@pytest.mark.slow
async def test_an_exchange_is_cut_by_another_task(tmp_path: Path) -> None:
    """While it reads, and while it writes a body that no buffer holds."""

    asked = trio.Event()

    async def converse(stream: trio.abc.Stream) -> None:
        if server.connections == 1:
            await read_request(stream)
            await stream.send_all(OK)
        await stream.receive_some(1)
        asked.set()
        await trio.sleep_forever()

    async def cut_it() -> None:
        await asked.wait()
        peer.cut()

    async with (
        one_server(tmp_path, converse) as (client, server),
        client.peer(NAME, server.policy, AnybodyMay()) as peer,
    ):
        peer.cut()
        await send(peer)
        for body in (BODY, b'{"pdus":[' + b" " * 20_000_000 + b"]}"):
            asked = trio.Event()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cut_it)
                with pytest.raises(SendFailed, match="we gave it up") as caught:
                    await send(peer, body=body)
            assert caught.value.sent
            assert client.connections.open == 0


@pytest.mark.parametrize("body", [BODY, b'{"pdus":[' + b" " * 20_000_000 + b"]}"])
@pytest.mark.parametrize("end", ["cut", "closed", "garbage", "late"])
async def test_a_connection_that_failed_is_gone_at_once(
    tmp_path: Path, end: str, body: bytes
) -> None:
    asked = trio.Event()

    async def converse(stream: trio.abc.Stream) -> None:
        await stream.receive_some(1)
        asked.set()
        if end == "garbage":
            await stream.send_all(b"no HTTP\r\n\r\n")
        if end != "closed":
            await trio.sleep_forever()

    async def cut_it() -> None:
        await asked.wait()
        if end == "cut":
            peer.cut()

    async with (
        one_server(tmp_path, converse) as (client, server),
        client.peer(NAME, server.policy, AnybodyMay()) as peer,
    ):
        with no_stream_left():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cut_it)
                with suppress(SendFailed), trio.move_on_after(0.2 if end == "late" else math.inf):
                    await send(peer, body=body)
                    raise AssertionError("there is no answer")


async def test_peer_left_while_holding_a_connection_gives_it_back(tmp_path: Path) -> None:
    async with one_server(tmp_path, answering(OK)) as (client, server):
        async with client.peer(NAME, server.policy, AnybodyMay()) as peer:
            await peer.connect()
            await peer.connect()
            assert client.connections.idle == 0
        assert client.connections.idle == 1
    assert server.connections == 1


# --- is anybody there -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "answers"),
    [
        (VERSION, True),
        (response(404, b"{}"), False),
        (response(200, b"<html>"), False),
        # A proxy that says the same to everything.
        (response(200, b""), False),
        (response(200, b"{}"), False),
        (response(200, b'{"server":null}'), False),
        (b"garbage\r\n\r\n", False),
        (response(200, b"[" + b" " * 100_000 + b"]"), False),
    ],
)
async def test_version_tells_a_homeserver_from_other_things(
    tmp_path: Path, answer: bytes, answers: bool
) -> None:
    requests: list[Request] = []
    async with (
        one_server(tmp_path, noting(requests, answer)) as (client, server),
        client.peer(NAME, server.policy, AnybodyMay()) as peer,
    ):
        with trio.fail_after(60):
            assert await peer.version_answers() is answers
    assert requests[0].line == "GET /_matrix/federation/v1/version HTTP/1.1"
    assert "authorization" not in requests[0].headers


async def test_version_of_a_server_that_is_down_does_not_answer(tmp_path: Path) -> None:
    Authority(tmp_path)
    async with client_of(tmp_path) as client:
        policy = Policy(address=TcpAddress("127.0.0.1", unused_port()))
        async with client.peer(NAME, policy, AnybodyMay()) as peer:
            with trio.fail_after(60):
                assert not await peer.version_answers()
            with pytest.raises(Unreachable, match="connection refused") as caught:
                await peer.connect()
            assert caught.value.kind == "refused"
            assert caught.value.text == f"connection refused ({policy.address})"
        assert client.connections.open == 0


# --- from a name to an answer ---------------------------------------------------------------------


async def test_delegated_server_is_found_by_well_known_and_proves_the_delegated_name(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path)
    network = TableNetwork()
    requests: list[Request] = []
    web_requests: list[Request] = []
    page = response(200, b'{"m.server":"d.example:443"}')
    saved, settings = Rows(), {"ip_deny": (), "ca_file": authority.file}
    async with (
        serving(authority.context(NAME), noting(web_requests, page)) as web,
        serving(authority.context("d.example"), noting(requests, OK)) as server,
        saving_client(settings, network, saved) as client,
    ):
        network.records = {(NAME, "A"): ["10.0.0.1"], ("d.example", "A"): ["10.0.0.2"]}
        network.ports = {("10.0.0.1", 443): web.port, ("10.0.0.2", 443): server.port}
        async with client.peer(NAME, Policy(), AnybodyMay()) as peer:
            await send(peer)
            await send(peer)
    assert web_requests[0].line == "GET /.well-known/matrix/server HTTP/1.1"
    assert web_requests[0].headers["host"] == NAME
    assert requests[0].headers["host"] == "d.example:443"
    assert 'destination="b.example"' in requests[0].headers["authorization"]
    assert (web.connections, web.left, server.connections) == (1, 1, 1)

    # A restarted client knows it all.
    network.asked.clear()
    async with (
        serving(authority.context("d.example"), answering(OK)) as server,
        saving_client(settings, network, saved) as client,
    ):
        network.ports["10.0.0.2", 443] = server.port
        async with client.peer(NAME, Policy(), AnybodyMay()) as peer:
            await send(peer)
    assert network.asked == []


async def test_name_servers_of_the_configuration_are_asked(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    zone: Zone = {(NAME, "A"): (60, "127.0.0.1")}
    async with (
        serving(authority.context(NAME), answering(OK)) as server,
        nameserver(zone) as (ip, port),
        client_of(tmp_path, nameservers=(f"{ip}:{port}",)) as client,
        client.peer(f"{NAME}:{server.port}", Policy(), AnybodyMay()) as peer,
    ):
        assert (await send(peer)).status == 200


async def test_well_known_cannot_lead_into_a_private_network(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    network = TableNetwork()
    page = response(302, b"", "Location: https://internal.example/secret")
    async with (
        serving(authority.context(NAME), answering(page)) as web,
        client_of(tmp_path, network, ip_deny=("10.0.0.0/8",)) as client,
    ):
        network.records = {(NAME, "A"): ["192.0.2.1"], ("internal.example", "A"): ["10.0.0.7"]}
        network.ports = {("192.0.2.1", 443): web.port, ("192.0.2.1", 8448): unused_port()}
        async with client.peer(NAME, Policy(), AnybodyMay()) as peer:
            with pytest.raises(Unreachable, match="refused") as caught:
                await peer.connect()
    assert "address outside the permitted IP ranges: 10.0.0.7" in caught.value.text
    assert network.dialled == [("192.0.2.1", 443), ("192.0.2.1", 8448)]


async def test_each_redirect_of_a_well_known_waits_for_its_turn_to_connect(tmp_path: Path) -> None:
    """Or there were six times as many handshakes a second as we permit ourselves."""
    authority = Authority(tmp_path)
    network, permit = TableNetwork(), AnybodyMay()
    page = response(302, b"", f"Location: https://{NAME}/.well-known/matrix/server")
    async with (
        serving(authority.context(NAME), answering(page)) as web,
        client_of(tmp_path, network) as client,
    ):
        network.records = {(NAME, "A"): ["10.0.0.1"]}
        network.ports = {("10.0.0.1", 443): web.port, ("10.0.0.1", 8448): unused_port()}
        async with client.peer(NAME, Policy(), permit) as peer:
            with pytest.raises(Unreachable, match="redirects"):
                await peer.connect()
    assert permit.turns == web.connections == 6


async def test_whom_a_well_known_redirects_to_does_not_pay(tmp_path: Path) -> None:
    payers: list[Payers] = []

    class Charging(TableNetwork):
        async def start_tls(
            self,
            stream: trio.abc.Stream,
            context: ssl.SSLContext,
            server_hostname: str,
            payer: Payer | None = None,
        ) -> trio.abc.Stream:
            assert payer is not None
            payers.append(payer.accounts)
            return await super().start_tls(stream, context, server_hostname, payer)

    authority = Authority(tmp_path)
    network = Charging()
    page = response(302, b"", "Location: https://victim.org/.well-known/matrix/server")
    async with (
        serving(authority.context(NAME), answering(page)) as evil,
        serving(authority.context("victim.org"), answering(response(404, b""))) as victim,
        client_of(tmp_path, network) as client,
    ):
        network.records = {(NAME, "A"): ["10.0.0.1"], ("victim.org", "A"): ["10.0.1.1"]}
        network.ports = {("10.0.0.1", 443): evil.port, ("10.0.1.1", 443): victim.port}
        network.ports["10.0.0.1", 8448] = unused_port()
        async with client.peer(NAME, Policy(), AnybodyMay()) as peer:
            with pytest.raises(Unreachable, match="refused"):
                await peer.connect()
    assert payers == [Payer(NAME).accounts] * 2


@pytest.mark.parametrize(("size", "turns"), [(2, 1), (1000, 2)])
async def test_a_small_answer_takes_one_turn_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, turns: int
) -> None:
    taken, take = 0, Turns.take

    async def count(*args: Any) -> object:
        nonlocal taken
        taken += 1
        return await take(*args)

    monkeypatch.setattr(Turns, "take", count)
    answer = response(200, b"{}".ljust(size))
    async with (
        one_server(tmp_path, answering(answer)) as (client, server),
        client.peer(NAME, server.policy, AnybodyMay()) as peer,
    ):
        for number in range(3):
            taken = 0
            await peer.connect()
            assert (await peer.put_transaction(f"t{number}", BODY, ())).is_answer
    # After the first, with which the session tickets came.
    assert taken == turns


@pytest.mark.parametrize("address", ["10.0.0.7", "::ffff:10.0.0.7", "0.0.0.0"])
async def test_dns_that_points_into_a_private_network_is_blocked(
    tmp_path: Path, address: str
) -> None:
    Authority(tmp_path)
    network = TableNetwork()
    network.records = {(NAME, "AAAA" if ":" in address else "A"): [address]}
    async with (
        client_of(tmp_path, network, ip_deny=("10.0.0.0/8",)) as client,
        client.peer(f"{NAME}:8448", Policy(), AnybodyMay()) as peer,
    ):
        with pytest.raises(Unreachable, match="permitted IP ranges") as caught:
            await peer.connect()
    assert caught.value.kind == "blocked"
    assert network.dialled == []


async def test_server_that_moved_is_found_at_the_second_attempt(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    network = TableNetwork(ttl_s=86_400)
    async with (
        serving(authority.context(NAME), answering(OK, then_close=True)) as server,
        client_of(tmp_path, network) as client,
    ):
        network.records = {(NAME, "A"): ["10.0.0.1"]}
        network.ports = {("10.0.0.1", 8448): server.port, ("10.0.0.2", 8448): server.port}
        async with client.peer(f"{NAME}:8448", Policy(), AnybodyMay()) as peer:
            await send(peer)
            network.records = {(NAME, "A"): ["10.0.0.2"]}
            network.ports["10.0.0.1", 8448] = unused_port()
            with pytest.raises((Unreachable, Stale)) as caught:
                await send(peer)
            if caught.type is Stale:
                with pytest.raises(Unreachable):
                    await send(peer)
            assert (await send(peer)).status == 200


async def test_our_own_lack_of_descriptors_says_nothing_of_the_server(tmp_path: Path) -> None:
    async with (
        one_server(tmp_path, answering(OK)) as (client, server),
        client.peer(NAME, server.policy, AnybodyMay()) as peer,
    ):
        # At first not even the file of certificates can be read.
        for _ in range(2):
            with no_descriptors(), pytest.raises(OutOfResources):
                await peer.connect()
            with no_descriptors():
                assert not await peer.version_answers()
            await send(peer)
            await client.connections.close()
            await trio.testing.wait_all_tasks_blocked(0.1)


async def test_metrics_count_requests_answers_and_connections(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    metrics = Metrics(OURS)
    config = Federation.model_validate({"ip_deny": (), "ca_file": authority.file})
    async with (
        serving(authority.context(NAME), answering(OK, response(500))) as server,
        open_client(config, runtime_with(RealNetwork()), OURS, KEY_RING, metrics) as client,
        client.peer(NAME, server.policy, AnybodyMay()) as peer,
    ):
        await send(peer)
        await send(peer)
        text = metrics.exposition().decode()
    for line in (
        r'synapse_http_matrixfederationclient_requests_total\{method="PUT".*\} 2\.0',
        r'synapse_http_matrixfederationclient_responses_total\{code="5xx",method="PUT".*\} 1\.0',
        r"fedsender_handshakes_total\{.*\} 1\.0",
        r"fedsender_connections\{.*\} 1\.0",
        r'fedsender_discoveries_total\{result="found".*\} 1\.0',
    ):
        assert re.search(line, text), line
