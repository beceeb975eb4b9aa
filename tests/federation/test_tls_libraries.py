"""Peers that use another TLS library than ours: GnuTLS (many C programs), rustls (Rust).

OpenSSL is on the other side in every other test.
"""

import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from tests.federation.servers import NAME, Authority
from tests.servers import free_port

from fedsender.config.values import IPRanges
from fedsender.federation.dialing import Dialer, TlsPolicy
from fedsender.federation.transport import AnswerMemory, Bounds, Connection
from fedsender.runtime import RealNetwork
from fedsender.tls import TlsStream

START_S = 30
VERSIONS = ("1.2", "1.3")

APP = """
async def app(scope, receive, send):
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"%d" % size})
"""


@asynccontextmanager
async def running(command: Sequence[str | Path], directory: Path) -> AsyncIterator[None]:
    """This command, until the body is left; its output is in the file `output`."""
    with (directory / "output").open("wb") as output:
        process = await trio.lowlevel.open_process(
            command, cwd=directory, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        yield
    finally:
        process.terminate()
        with trio.CancelScope(shield=True):
            await process.wait()


async def dial(authority: Authority, port: int) -> Connection:
    """A connection as the daemon opens it, once the server listens."""
    dialer = Dialer(RealNetwork(), connect_s=5, handshake_s=10)
    with trio.fail_after(START_S):
        while True:
            try:
                await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
                break
            except OSError:
                await trio.sleep(0.05)
    tls = TlsPolicy(ca_file=authority.file)
    return await dialer.open([("127.0.0.1", port)], NAME, tls, IPRanges())


def files(authority: Authority, directory: Path) -> tuple[Path, Path]:
    """The server's certificates, and its key."""
    issued = authority.issue(NAME)
    chain, key = directory / "chain.pem", directory / "key.pem"
    chain.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
    # rustls reads this form alone.
    key.write_bytes(issued.private_key_pem.bytes())
    return chain, key


@asynccontextmanager
async def gnutls(directory: Path, version: str) -> AsyncIterator[TlsStream]:
    """A stream to a server that sends each line back, and takes commands in lines of their own."""
    authority, port = Authority(directory), free_port()
    chain, key = files(authority, directory)
    command: list[str | Path] = ["gnutls-serv", "--echo", "--port", str(port)]
    command += [
        "--x509certfile",
        chain,
        "--x509keyfile",
        key,
        "--priority",
        f"NORMAL:-VERS-ALL:+VERS-TLS{version}",
    ]
    async with running(command, directory):
        connection = await dial(authority, port)
        assert isinstance(connection.stream, TlsStream)
        try:
            yield connection.stream
        finally:
            connection.stream.close()


async def line_from(stream: TlsStream) -> bytes:
    """The next line of the server, or what came before its end."""
    said = b""
    while not said.endswith(b"\n"):
        data = await stream.receive_some()
        if not data:
            break
        said += data
    return said


@pytest.mark.program("gnutls-serv", "gnutls-bin")
@pytest.mark.parametrize("version", VERSIONS)
async def test_gnutls_long_and_short_lines_come_back(tmp_path: Path, version: str) -> None:
    with trio.fail_after(60):
        async with gnutls(tmp_path, version) as stream:
            for size in (1, 100_000, 10, 16_384, 1_000):
                await stream.send_all(b"x" * size + b"\n")
                assert await line_from(stream) == b"x" * size + b"\n"
            # Session tickets are no answer, and an idle connection is not closed for them.
            assert not await stream.deserted()


@pytest.mark.program("gnutls-serv", "gnutls-bin")
@pytest.mark.parametrize("version", VERSIONS)
async def test_gnutls_new_keys_are_taken_and_renegotiation_is_refused(
    tmp_path: Path, version: str
) -> None:
    """TLS 1.3 has a change of keys in its place (RFC 8446, 4.6.3)."""
    with trio.fail_after(60):
        async with gnutls(tmp_path, version) as stream:
            await stream.send_all(b"**REHANDSHAKE**\n")
            assert await line_from(stream) == b"Successfully executed command\n"
            await stream.send_all(b"again\n")
            assert await line_from(stream) == (b"again\n" if version == "1.3" else b"")


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
async def test_rustls_requests_of_any_size_on_one_connection(tmp_path: Path, version: str) -> None:
    authority, port = Authority(tmp_path), free_port()
    chain, key = files(authority, tmp_path)
    (tmp_path / "app.py").write_text(APP)
    command: list[str | Path] = [sys.executable, "-m", "granian", "--interface", "asgi"]
    command += ["--port", str(port), "--ssl-certificate", chain, "--ssl-keyfile", key, "app:app"]
    command += ["--ssl-protocol-min", f"tls{version}"]
    async with running(command, tmp_path):
        with trio.fail_after(90):
            connection = await dial(authority, port)
            for size in (2, 1_200, 50_000, 1_000_000):
                answer = await connection.exchange(
                    "PUT",
                    "/x",
                    b"host: x\r\n",
                    b"x" * size,
                    bounds=Bounds(body_bytes=100),
                    memory=AnswerMemory(),
                )
                assert (answer.status, answer.body) == (200, b"%d" % size)
            assert connection.reusable
            connection.close()
