"""Whose certificates are believed: several authorities, and servers that need none."""

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
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


async def test_an_authority_without_key_usage_is_believed_as_synapse_believes_it(
    tmp_path: Path,
) -> None:
    """`openssl req -x509` makes such; Python's own context refuses it from 3.13 on."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(of_plain_authority(tmp_path))
    async with (
        serving(context, answering(OK)) as server,
        client_of(tmp_path) as client,
        client.peer(NAME, server.policy, AnybodyMay()) as peer,
    ):
        assert (await send(peer)).status == 200


def of_plain_authority(directory: Path) -> Path:
    """A file with a key and a certificate for NAME; its authority is `ca.pem`."""
    theirs, own = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    issuer, subject = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in ("authority", NAME)
    )
    now = datetime.now(UTC)

    def signed(name: x509.Name, key: ec.EllipticCurvePrivateKey, said: x509.ExtensionType) -> bytes:
        return (
            x509.CertificateBuilder(issuer, name, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(said, critical=False)
            .sign(theirs, hashes.SHA256())
            .public_bytes(Encoding.PEM)
        )

    ca = signed(issuer, theirs, x509.BasicConstraints(True, None))
    (directory / "ca.pem").write_bytes(ca)
    leaf = signed(subject, own, x509.SubjectAlternativeName([x509.DNSName(NAME)]))
    private = own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    both = directory / "both.pem"
    both.write_bytes(private + leaf)
    return both


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
