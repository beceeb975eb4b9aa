"""Whose certificates are believed: several authorities, and servers that need none."""

import ssl
from pathlib import Path

import pytest
from tests.federation.servers import (
    NAME,
    OK,
    AnybodyMay,
    Authority,
    answering,
    client_of,
    one_server,
    send,
    serving,
)

from fedsender.federation.client import Unreachable
from fedsender.federation.dialing import TlsPolicy


async def test_more_authorities_than_one(tmp_path: Path) -> None:
    """Synapse's federation_custom_ca_list."""
    ours, other = tmp_path / "one", tmp_path / "two"
    ours.mkdir()
    other.mkdir()
    Authority(ours)
    authority = Authority(other)
    async with serving(authority.context(NAME), answering(OK)) as server:
        async with (
            client_of(ours) as client,
            client.peer(NAME, server.policy, AnybodyMay()) as peer,
        ):
            with pytest.raises(Unreachable, match="certificate"):
                await send(peer)
        async with (
            client_of(ours, None, more_ca_files=(authority.file,)) as client,
            client.peer(NAME, server.policy, AnybodyMay()) as peer,
        ):
            assert (await send(peer)).status == 200


async def test_one_server_need_not_prove_who_it_is(tmp_path: Path) -> None:
    """Synapse's federation_certificate_verification_whitelist; and a server alone may have to."""
    async with one_server(tmp_path, answering(OK)) as (client, server):
        Authority(tmp_path)  # Another one by now: the server's own is not trusted.
        unchecked = server.policy.model_copy(update={"verify_certificates": False})
        async with client.peer(NAME, unchecked, AnybodyMay()) as peer:
            assert (await send(peer)).status == 200
        async with client.peer(NAME, server.policy, AnybodyMay()) as peer:
            with pytest.raises(Unreachable, match="certificate"):
                await send(peer)


def test_a_file_that_holds_no_certificates_is_named(tmp_path: Path) -> None:
    Authority(tmp_path)
    bad = tmp_path / "bad.pem"
    bad.write_text("x")
    with pytest.raises(Unreachable, match=r"CA file .*bad\.pem"):
        TlsPolicy(tmp_path / "ca.pem", more_ca_files=(bad,)).context()
    assert TlsPolicy(tmp_path / "ca.pem").context().verify_mode == ssl.CERT_REQUIRED
