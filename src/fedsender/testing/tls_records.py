"""Records of TLS 1.3 that no library sends: key updates without end, say, or tickets of any number.

A server's OpenSSL shakes hands and logs its secret; from then on the records are made here.
"""

import struct
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

DATA: Final = 23
HANDSHAKE: Final = 22
KEY_UPDATE: Final = b"\x18\x00\x00\x01\x01"
"""It asks for one in return (RFC 8446, section 4.6.3)."""


class Sealer:
    """Seals records as the server whose secret it is; nothing else may seal them from then on."""

    def __init__(self, cipher: str, secret: bytes) -> None:
        """`cipher`: as `ssl.SSLObject.cipher` names it, such as "TLS_AES_256_GCM_SHA384"."""
        self._hash = hashes.SHA384() if cipher.endswith("384") else hashes.SHA256()
        self._aead = ChaCha20Poly1305 if "CHACHA20" in cipher else AESGCM
        self._key_bytes = 16 if "_128_" in cipher else 32
        self._secret = secret
        self._number = 0

    def record(self, kind: int, data: bytes) -> bytes:
        """One record (RFC 8446, section 5.2)."""
        inner = data + bytes([kind])
        head = b"\x17\x03\x03" + struct.pack("!H", len(inner) + 16)
        nonce = int.from_bytes(self._expand(b"iv", 12), "big") ^ self._number
        self._number += 1
        key = self._expand(b"key", self._key_bytes)
        return head + self._aead(key).encrypt(nonce.to_bytes(12, "big"), inner, head)

    def key_update(self) -> bytes:
        """A record that renews our key, and asks the peer to renew its own."""
        record = self.record(HANDSHAKE, KEY_UPDATE)
        self._secret = self._expand(b"traffic upd", self._hash.digest_size)
        self._number = 0
        return record

    def _expand(self, label: bytes, size: int) -> bytes:
        """HKDF-Expand-Label (RFC 8446, section 7.1), without a context."""
        name = b"tls13 " + label
        info = struct.pack("!HB", size, len(name)) + name + b"\x00"
        return HKDFExpand(self._hash, size, info).derive(self._secret)


def secret_in(key_log: Path) -> bytes:
    """The server's first secret for data, of the last connection in a log of keys."""
    lines = [line for line in key_log.read_text().splitlines() if line.startswith(_SECRET)]
    return bytes.fromhex(lines[-1].split()[2])


_SECRET: Final = "SERVER_TRAFFIC_SECRET_0 "
