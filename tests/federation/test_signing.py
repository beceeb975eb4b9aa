"""Signing keys and X-Matrix headers, with signedjson and canonicaljson as the oracle."""

import re
from base64 import b64encode
from pathlib import Path
from typing import Any

import canonicaljson
import pytest
import signedjson.key
import signedjson.sign
from cryptography.hazmat.primitives.asymmetric.ed448 import Ed448PrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from hypothesis import given
from hypothesis import strategies as st

from fedsender.federation.signing import (
    BadSigningKey,
    authorization_header,
    load_signing_keys,
    parse_signing_keys,
    signing_key_from_seed,
)

SEED = bytes(range(32))
ENCODED = b64encode(SEED).rstrip(b"=").decode()

text = st.text(st.characters(exclude_categories=["Cs"]))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=20,
)


def header_fields(header: str) -> dict[str, str]:
    scheme, _, parameters = header.partition(" ")
    assert scheme == "X-Matrix"
    return dict(re.findall(r'(\w+)="([^"]*)"', parameters))


@given(
    body=st.dictionaries(text, json_values, max_size=6),
    uri=text,
    seed=st.binary(min_size=32, max_size=32),
)
def test_header_carries_the_signature_that_signedjson_makes(
    body: dict[str, Any], uri: str, seed: bytes
) -> None:
    key = signing_key_from_seed("a_1", seed)
    oracle = signedjson.key.decode_signing_key_base64("ed25519", "a_1", b64encode(seed).decode())
    request = {
        "content": body,
        "destination": "b.example:8448",
        "method": "PUT",
        "origin": "a.example",
        "uri": uri,
    }
    signed = signedjson.sign.sign_json(request, "a.example", oracle)

    encoded = canonicaljson.encode_canonical_json(body)
    header = authorization_header("a.example", "b.example:8448", "PUT", uri, encoded, key)

    assert header_fields(header) == {
        "origin": "a.example",
        "destination": "b.example:8448",
        "key": "ed25519:a_1",
        "sig": signed["signatures"]["a.example"]["ed25519:a_1"],
    }


def test_request_without_a_body_is_signed_without_content() -> None:
    key = signing_key_from_seed("1", SEED)
    oracle = signedjson.key.decode_signing_key_base64("ed25519", "1", ENCODED)
    request = {"destination": "b", "method": "GET", "origin": "a", "uri": "/x?y=%20"}
    signed = signedjson.sign.sign_json(request, "a", oracle)

    header = authorization_header("a", "b", "GET", "/x?y=%20", None, key)

    assert header_fields(header)["sig"] == signed["signatures"]["a"]["ed25519:1"]


@pytest.mark.parametrize("size", [12_287, 12_288, 64_000])
def test_a_large_request_has_the_signature_that_a_small_one_would_have(size: int) -> None:
    key = signing_key_from_seed("1", SEED)
    oracle = signedjson.key.decode_signing_key_base64("ed25519", "1", ENCODED)
    message = b"x" * size

    assert key.sign(message) == b64encode(oracle.sign(message).signature).decode().rstrip("=")


@pytest.mark.parametrize("name", ['b"', "b\\", "b\r\nX: y", "b c", "b\u00fc"])
def test_name_that_would_break_the_header_is_refused(name: str) -> None:
    key = signing_key_from_seed("1", SEED)
    with pytest.raises(ValueError, match="not a server name"):
        authorization_header("a", name, "GET", "/", None, key)


def test_the_first_key_of_a_file_of_synapse_signs_requests(tmp_path: Path) -> None:
    """Synapse publishes no other, and a request with two `Authorization` headers is refused."""
    file = tmp_path / "signing.key"
    file.write_text(f"ed25519 a_new {ENCODED}\n\ned25519 old {ENCODED}\n")

    key, other = load_signing_keys(file)

    assert (key.key_id, other.key_id) == ("ed25519:a_new", "ed25519:old")
    oracle = signedjson.key.decode_signing_key_base64("ed25519", "a_new", ENCODED)
    assert key.public_key() == b64encode(bytes(oracle.verify_key)).rstrip(b"=").decode()


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (f"ed25519 {ENCODED}", r"found 2 word"),
        (f"rsa 1 {ENCODED}", "only ed25519"),
        (f"ed25519 a:b {ENCODED}", "key version"),
        (f"ed25519 1 {ENCODED[:-8]}", "bytes long"),
        (f"ed25519 1 {ENCODED[:-2]}!!", "not base64"),
        (f"ed25519 ü {ENCODED}", "not ASCII"),
        (f"ed25519 good {ENCODED}", "same version"),
    ],
)
def test_bad_line_is_named_by_file_and_number_without_the_key(line: str, complaint: str) -> None:
    contents = f"ed25519 good {ENCODED}\n{line}\n"

    with pytest.raises(BadSigningKey, match=rf"^keys/signing\.key:2: .*{complaint}") as caught:
        parse_signing_keys(contents.encode(), "keys/signing.key")

    assert ENCODED[:16] not in str(caught.value)


KEY_ID = "ed25519:a_1"


def pem(key: PrivateKeyTypes, passphrase: bytes | None = None) -> bytes:
    hidden = BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, hidden)


OURS = Ed25519PrivateKey.from_private_bytes(SEED)


@pytest.mark.parametrize(
    "text", [ENCODED, f"{ENCODED}=\n", pem(OURS).decode(), "\n" + pem(OURS).decode()]
)
def test_a_seed_in_base64_and_pem_are_the_same_key_as_a_line_of_synapse(text: str) -> None:
    (expected,) = parse_signing_keys(f"ed25519 a_1 {ENCODED}".encode(), "key")

    (key,) = parse_signing_keys(text.encode(), "key", KEY_ID)

    assert (key.key_id, key.public_key()) == (KEY_ID, expected.public_key())


@pytest.mark.parametrize(
    ("text", "key_id", "complaint"),
    [
        (ENCODED.encode(), None, "signing_key_id must be set"),
        (pem(OURS), None, "signing_key_id must be set"),
        (f"ed25519 a_1 {ENCODED}\n".encode(), KEY_ID, "signing_key_id must not be set"),
        (ENCODED[:-8].encode(), KEY_ID, "bytes long"),
        (f"{ENCODED[:-2]}!!".encode(), KEY_ID, "not base64"),
        (f"{ENCODED}ü".encode(), KEY_ID, "not base64"),
        (pem(OURS, b"a word"), KEY_ID, "without a passphrase"),
        (pem(OURS)[:-40], KEY_ID, "not a PEM block"),
        (pem(OURS).replace(b"PRIVATE", b"MATRIX PRIVATE"), KEY_ID, "not a PEM block"),
        (pem(Ed448PrivateKey.generate()), KEY_ID, "only ed25519"),
    ],
)
def test_a_key_in_another_form_is_one_clear_error_without_the_key(
    text: bytes, key_id: str | None, complaint: str
) -> None:
    with pytest.raises(BadSigningKey, match=rf"^keys/signing\.key: .*{complaint}") as caught:
        parse_signing_keys(text, "keys/signing.key", key_id)

    assert ENCODED[:16] not in str(caught.value)


def test_empty_and_missing_and_huge_files_are_one_clear_error_each(tmp_path: Path) -> None:
    empty, huge = tmp_path / "empty", tmp_path / "huge"
    empty.write_text("\n")
    huge.write_bytes(b"x" * 70_000)

    for path, complaint in [
        (empty, "no signing key"),
        (huge, "larger than"),
        (tmp_path / "missing", "No such file"),
        (tmp_path, "directory"),
    ]:
        with pytest.raises(BadSigningKey, match=complaint):
            load_signing_keys(path)


def test_key_never_shows_in_its_repr() -> None:
    key = signing_key_from_seed("1", SEED)
    assert repr(key) == "SigningKey(version='1')"
