"""The homeserver's signing keys, and the `Authorization` header of a federation request.

A request is signed as the JSON object {"content", "destination", "method", "origin", "uri"}
(server-server API, "Request Authentication"). Its content is the transaction, with bytes that are
canonical already: the rest of the object is written around them, and nothing is encoded twice.
"""

import re
from base64 import b64decode, b64encode
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import orjson
from nacl.bindings import crypto_sign, crypto_sign_BYTES, crypto_sign_seed_keypair

from fedsender.config.document import ConfigError, OutOfReach
from fedsender.config.values import read_bytes
from fedsender.matrix import canonical_json

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from fedsender.config import Config

_PREFIX: Final = "ed25519:"
_PEM: Final = b"-----BEGIN "
_VERSION: Final = re.compile(r"[A-Za-z0-9_]{1,64}", re.ASCII)
_SEED_BYTES: Final = 32
# From here on OpenSSL signs sooner, because it hashes faster (docs/figures.md).
_LARGE_BYTES: Final = 12_288
# Server names that were looked at; a name is at most 255 bytes.
_REMEMBERED: Final = 10_000
# Server names and key ids have none of these (appendix "Server name"), so nothing needs escaping.
_UNQUOTABLE: Final = re.compile(r'["\\\x00-\x20\x7f-\U0010ffff]')


class BadSigningKey(ValueError):
    """A signing key file cannot be used. The text names file and line, never the key."""


@dataclass(frozen=True, slots=True)
class SigningKey:
    """One Ed25519 key of our homeserver.

    Attributes:
        version: the part of its key id after "ed25519:".
    """

    version: str
    _public: bytes = field(repr=False)
    _secret: bytes = field(repr=False, compare=False)

    @property
    def key_id(self) -> str:
        """The name of the public half for peers, "ed25519:<version>"."""
        return _PREFIX + self.version

    def sign(self, message: bytes) -> str:
        """The signature of `message` as unpadded base64."""
        if len(message) < _LARGE_BYTES:
            return _unpadded(crypto_sign(message, self._secret)[:crypto_sign_BYTES])
        return _unpadded(_openssl_key(self._secret[:_SEED_BYTES]).sign(message))

    def public_key(self) -> str:
        """The public half as unpadded base64, as `/_matrix/key/v2/server` shows it."""
        return _unpadded(self._public)


class KeyRing:
    """The signing keys in use, for all who sign; a reload replaces them.

    Attributes:
        keys: the first one signs requests, each one signs the events of a homeserver that has its
            events signed here.
    """

    def __init__(self, *keys: SigningKey) -> None:
        assert keys, "a key file has a key"
        self.keys = keys


def signing_key_from_seed(version: str, seed: bytes) -> SigningKey:
    """A key from its 32 secret bytes; raises BadSigningKey."""
    if not _VERSION.fullmatch(version):
        raise BadSigningKey("key version must be 1 to 64 letters, digits or underscores")
    if len(seed) != _SEED_BYTES:
        raise BadSigningKey(f"the key is {len(seed)} bytes long, not {_SEED_BYTES}")
    return SigningKey(version, *crypto_sign_seed_keypair(seed))


def keys_of(config: "Config") -> tuple[SigningKey, ...]:
    """The keys of a configuration; raises ConfigError, with the line that names the file."""
    try:
        return load_signing_keys(config.signing_key, config.signing_key_id)
    except BadSigningKey as error:
        raise ConfigError(config.problem(("signing_key",), str(error))) from None


def load_signing_keys(path: Path, key_id: str | None = None) -> tuple[SigningKey, ...]:
    """Read a key file: see `parse_signing_keys`.

    Requests are signed with the first key alone, as Synapse does: a request has one `Authorization`
    header at most (RFC 9110, 5.3), and nginx answers 400 to one with two.

    Raises:
        BadSigningKey: it cannot be read, or its content cannot be used.
        OutOfReach: it cannot be read now.
    """
    try:
        return parse_signing_keys(read_bytes(path), str(path), key_id)
    except OutOfReach:
        raise
    except ConfigError as error:
        raise BadSigningKey(str(error)) from None


def parse_signing_keys(
    text: bytes, source: str, key_id: str | None = None
) -> tuple[SigningKey, ...]:
    """The keys in the text of a key file, in one of three forms.

    - As Synapse writes it: lines of `ed25519 <version> <unpadded base64 seed>`.
    - One seed: 32 bytes in base64, and nothing else.
    - One PEM block `PRIVATE KEY` (PKCS #8, RFC 8410), without a passphrase.

    Args:
        source: names the file in errors.
        key_id: "ed25519:<version>", for a key in one of the last two forms, which have no id.

    Raises BadSigningKey.
    """
    if len(text.split()) == 1 or text.lstrip().startswith(_PEM):
        try:
            return (_key_without_id(text.strip(), key_id),)
        except BadSigningKey as error:
            raise BadSigningKey(f"{source}: {error}") from None
    if key_id is not None:
        raise BadSigningKey(f"{source}: its keys have ids, so signing_key_id must not be set")
    keys: dict[str, SigningKey] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            key = _parse_line(line)
            if key.version in keys:
                raise BadSigningKey("second key of the same version")
        except BadSigningKey as error:
            raise BadSigningKey(f"{source}:{number}: {error}") from None
        keys[key.version] = key
    if not keys:
        raise BadSigningKey(f"{source}: no signing key in it")
    return tuple(keys.values())


def _key_without_id(text: bytes, key_id: str | None) -> SigningKey:
    # The content first: of a file that is no key, the id does not matter.
    pem = text.startswith(_PEM)
    seed = _seed_of_pem(text) if pem else _decoded(text.decode("ascii", "replace"))
    key = signing_key_from_seed((key_id or "none").removeprefix(_PREFIX), seed)
    if key_id is None:
        raise BadSigningKey("its key has no id, so signing_key_id must be set")
    return key


@lru_cache(4)
def _openssl_key(seed: bytes) -> "Ed25519PrivateKey":
    # 5 ms, once. 7 MB that a server without large transactions does without.
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(seed)


def _seed_of_pem(text: bytes) -> bytes:
    # 9 MB, and whoever has such a key needs them only when the file is read.
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        private = load_pem_private_key(text, None)
    except (TypeError, ValueError, UnsupportedAlgorithm):
        # The library's own text may say more of the key than a log should.
        why = "not a PEM block `PRIVATE KEY` (PKCS #8) without a passphrase"
        raise BadSigningKey(why) from None
    if not isinstance(private, Ed25519PrivateKey):
        raise BadSigningKey("only ed25519 keys are known")
    return private.private_bytes_raw()


def _parse_line(line: bytes) -> SigningKey:
    try:
        parts = line.decode("ascii").split()
    except UnicodeDecodeError:
        raise BadSigningKey("not ASCII text") from None
    if len(parts) != 3:
        raise BadSigningKey(f"expected `ed25519 <version> <key>`, found {len(parts)} word(s)")
    algorithm, version, encoded = parts
    if algorithm != "ed25519":
        raise BadSigningKey("only ed25519 keys are known")
    return signing_key_from_seed(version, _decoded(encoded))


def _decoded(encoded: str) -> bytes:
    try:
        return b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except ValueError:
        raise BadSigningKey("the key is not base64") from None


def request_to_sign(
    origin: str, destination: str, method: str, uri: str, body: bytes | None
) -> bytes:
    """The canonical JSON that a request's signature covers.

    Args:
        uri: path and query of the request target, as sent.
        body: the request's JSON in canonical form, or None where it has no body.
    """
    rest = b'"destination":%b,"method":%b,"origin":%b,"uri":%b}' % (
        _quoted(destination),
        _quoted(method),
        _quoted(origin),
        orjson.dumps(uri),
    )
    # The body is copied once.
    return b"{" + rest if body is None else b"".join((b'{"content":', body, b",", rest))


def authorization_header(
    origin: str, destination: str, method: str, uri: str, body: bytes | None, key: SigningKey
) -> str:
    """The value of the `Authorization` header that lets `destination` verify this request.

    Args:
        origin: our server name.
        uri: path and query of the request target, as sent.
        body: the request's JSON in canonical form, or None where it has no body.

    Raises:
        ValueError: a name holds a character that no server name has.
    """
    _quotable(origin)
    _quotable(destination)
    signature = key.sign(request_to_sign(origin, destination, method, uri, body))
    return (
        f'X-Matrix origin="{origin}",destination="{destination}",'
        f'key="{key.key_id}",sig="{signature}"'
    )


# Not orjson's own bytes: they keep the 4 KiB that they were written into.
_quoted = lru_cache(_REMEMBERED)(canonical_json)


def _quotable(name: str) -> None:
    if _UNQUOTABLE.search(name):
        raise ValueError(f"not a server name: {name[:255]!r}")


def _unpadded(data: bytes) -> str:
    return b64encode(data).rstrip(b"=").decode("ascii")
