"""A certificate authority for servers on loopback, made anew for each run.

Made for the demo, for tests and for benchmarks: the keys live as long as the directory they are
written to, and nothing outside that directory ever trusts them.
"""

import datetime
import ipaddress
import os
import ssl
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME = datetime.timedelta(days=7)
"""Long enough for a directory that was kept and is looked at again; too short to be forgotten."""


class Authority:
    """One certificate authority; `ca_file` is for its clients."""

    def __init__(self, directory: Path, now_ms: int) -> None:
        """Make the authority, and `ca.pem` in `directory`.

        Args:
            now_ms: the wall clock in milliseconds since the epoch; certificates are good from an
                hour before it.
        """
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._not_before = datetime.datetime.fromtimestamp(
            now_ms / 1000, datetime.UTC
        ) - datetime.timedelta(hours=1)
        self._name = _name("fedsender demo authority")
        self._certificate = (
            self._builder(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca_file = directory / "ca.pem"
        self.ca_file.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def server_context(self, names: Iterable[str]) -> ssl.SSLContext:
        """A server's TLS context with a certificate for `names` (DNS names and IP literals)."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            self._builder(_name("fedsender demo server"), key.public_key())
            .add_extension(x509.SubjectAlternativeName(map(_alternative, names)), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._load(context, certificate, key)
        return context

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey
    ) -> x509.CertificateBuilder:
        authority_key = self._key.public_key()
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._not_before)
            .not_valid_after(self._not_before + LIFETIME)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key), critical=False
            )
        )

    def _load(
        self,
        context: ssl.SSLContext,
        certificate: x509.Certificate,
        key: ec.EllipticCurvePrivateKey,
    ) -> None:
        """Put a certificate and its key into `context`, which takes them only from a file."""
        pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ) + certificate.public_bytes(serialization.Encoding.PEM)
        path = self._directory / f"server-{certificate.serial_number:x}.pem"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(pem)
        context.load_cert_chain(path)
        path.unlink()


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
