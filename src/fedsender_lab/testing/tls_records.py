"""Records of TLS 1.3 that no library sends: key updates without end, say, or tickets of any number.

A server's OpenSSL shakes hands and logs its secret; from then on the records are made here.
"""

import ssl
import struct
from pathlib import Path
from typing import Final

import trio
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


def secret_in(key_log: Path, *, of: str = "SERVER") -> bytes:
    """A server's first secret for data, or a CLIENT's, of the last connection in a log of keys."""
    start = f"{of}_TRAFFIC_SECRET_0 "
    lines = [line for line in key_log.read_text().splitlines() if line.startswith(start)]
    return bytes.fromhex(lines[-1].split()[2])


_SECRET: Final = "SERVER_TRAFFIC_SECRET_0 "


PIECE: Final = 16_384
_UPDATES_AT_ONCE: Final = 50
_RECEIVE_BYTES: Final = 65_536


class UpdatingStream:
    """A server's connection (`http.ServerStream`) that renews its key far more often than it may.

    Args:
        context: of TLS 1.3, without tickets, with a log of keys of its own.
        before: updates before each answer.
        idle: updates once the client has said nothing for `after_s` seconds.
    """

    peer_gone = False
    """Unknown while nothing is read."""

    def __init__(
        self,
        raw: trio.SocketStream,
        context: ssl.SSLContext,
        *,
        before: int = 0,
        idle: int = 0,
        after_s: float = 1.0,
    ) -> None:
        self._raw = raw
        self._key_log = Path(str(context.keylog_filename))
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._before, self._idle, self._after_s = before, idle, after_s
        self._sealer: Sealer | None = None

    async def send_all(self, data: bytes) -> None:
        """Send it, behind `before` updates."""
        assert self._sealer is not None
        await self._update(self._before)
        for start in range(0, len(data), PIECE):
            await self._raw.send_all(self._sealer.record(DATA, data[start : start + PIECE]))

    async def receive_some(self, max_bytes: int) -> bytes:
        """What the client sends; raises BrokenResourceError."""
        if self._sealer is None:
            self._sealer = await self._shake_hands()
        silent_s = self._after_s if self._idle else float("inf")
        while True:
            try:
                return self._tls.read(max_bytes)
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                raise trio.BrokenResourceError from error
            with trio.move_on_after(silent_s) as silence:
                received = await self._raw.receive_some(_RECEIVE_BYTES)
            if silence.cancelled_caught:
                await self._update(self._idle)
                silent_s = float("inf")
            elif not received:
                return b""
            else:
                self._incoming.write(received)

    async def _shake_hands(self) -> Sealer:
        secret = b""
        while True:
            done = True
            # No other connection logs its secret between these lines.
            self._key_log.write_bytes(b"")
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                done = False
            except ssl.SSLError as error:
                raise trio.BrokenResourceError from error
            if _SECRET in self._key_log.read_text():
                secret = secret_in(self._key_log)
            if self._outgoing.pending:
                await self._raw.send_all(self._outgoing.read())
            if done:
                cipher = self._tls.cipher()
                assert cipher is not None
                return Sealer(cipher[0], secret)
            received = await self._raw.receive_some(_RECEIVE_BYTES)
            if not received:
                raise trio.BrokenResourceError("closed in the handshake")
            self._incoming.write(received)

    async def _update(self, count: int) -> None:
        assert self._sealer is not None
        for start in range(0, count, _UPDATES_AT_ONCE):
            some = range(start, min(count, start + _UPDATES_AT_ONCE))
            await self._raw.send_all(b"".join(self._sealer.key_update() for _ in some))

    async def wait_peer_gone(self) -> None:
        """Return when the other side has closed, or breaks the silence."""
        await trio.lowlevel.wait_readable(self._raw.socket)

    def reset(self) -> None:
        """Close without a goodbye."""
        self._raw.socket.close()

    async def aclose(self) -> None:
        """Close without a goodbye, too: OpenSSL does not know the key by now."""
        await self._raw.aclose()
