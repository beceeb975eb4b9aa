"""How the homeserver's processes are reached: what may stand together in `feed`."""

from pathlib import Path
from typing import Any

import pytest

from fedsender.config import Config, ConfigError, TcpAddress, UnixAddress, from_values
from fedsender.config.values import HttpPeer


def load(feed: dict[str, Any]) -> Config:
    values = {"server_name": "hs.example", "signing_key": "key", "feed": feed}
    return from_values(values, directory=Path("/etc/fedsender"))


@pytest.mark.parametrize(
    ("feed", "error"),
    [
        ({"tcp": {"address": "unix:/x", "tls": True}}, "feed.tcp.tls: cannot be used on a Unix so"),
        ({"tcp": {"ca_file": "x"}}, "feed.tcp.ca_file: has no use without tls: true"),
        (
            {"tcp": {"address": "10.0.0.1:9092", "secret_file": "x"}},
            "feed.tcp.secret_file: would be sent in clear: needs tls, or a loopback address",
        ),
        (
            {"tcp": {"address": "hub.example:9092", "secret_file": "x"}},
            "feed.tcp.secret_file: would be sent in clear",
        ),
        (
            {"redis": {"address": "unix:/x", "tls": True}},
            "feed.redis.tls: cannot be used on a Unix socket",
        ),
        ({"redis": {"certificate_file": "x"}}, "feed.redis.certificate_file: has no use without t"),
        ({"redis": {"ca_directory": "x"}}, "feed.redis.ca_directory: has no use without tls: true"),
        (
            {"redis": {"tls": True, "private_key_file": "x"}},
            "feed.redis.private_key_file: needs a certificate_file",
        ),
        (
            {"push": {"listen": "10.0.0.1:1"}},
            "feed.push.listen: is no loopback IP, so ",
        ),
        ({"push": {"certificate_file": "x"}}, "private_key_file: goes with certificate_file: both"),
        (
            {"push": {"certificate_file": "x", "private_key_file": "y"}},
            "feed.push.certificate_file: has no use on a Unix socket",
        ),
        ({"http": {"ca_file": "x"}}, "feed.http.ca_file: has no use without an https:// address"),
        ({"http": {"instances": {"master": "http://x:1"}}}, "must be an address such as"),
        ({"http": {"instances": {"master": "https://x"}}}, "must be an address such as"),
        ({"http": {"instances": {"master": 7}}}, "must be an address such as"),
    ],
)
def test_what_contradicts_itself_is_named(feed: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(feed)
    assert error in str(caught.value)


@pytest.mark.parametrize("database", ["sqlite:///hs.db", "postgresql://db/hs"])
@pytest.mark.parametrize("own", ["sqlite:///own.db", "postgresql://db/own"])
@pytest.mark.parametrize("kind", ["push", "relay", "tcp"])
def test_several_senders_share_two_postgresqls(kind: str, database: str, own: str) -> None:
    values = {
        "server_name": "hs.example",
        "signing_key": "key",
        "instance_name": "a",
        "homeserver": {"database": database, "federation_sender_instances": ["a", "b"]},
        "sender_database": own,
        "feed": {
            "kind": kind,
            "push": {"token_file": "x"},
            "relay": {"address": "unix:/relay.sock"},
        },
    }
    if "sqlite" in database + own:
        with pytest.raises(ConfigError, match=r"must be one PostgreSQL for all senders"):
            from_values(values, directory=Path("/etc/fedsender"))
    else:
        from_values(values, directory=Path("/etc/fedsender"))


@pytest.mark.parametrize("address", ["unix:/x", "127.0.0.1:9092", "[::1]:1", "localhost:9092"])
def test_a_secret_needs_no_tls_where_nobody_listens(address: str) -> None:
    assert load({"tcp": {"address": address, "secret_file": "x"}}).feed.tcp.secret_file is not None


def test_whoever_may_append_can_come_from_elsewhere_inside_tls() -> None:
    tls = {"certificate_file": "x", "private_key_file": "y"}
    push = load({"push": {"listen": "0.0.0.0:9094", **tls}}).feed.push
    assert push.listen == TcpAddress("0.0.0.0", 9094)


def test_addresses_of_processes() -> None:
    """Names of containers may have an underscore."""
    instances = {
        "master": "https://synapse_main:9093",
        "typist": "unix:/run/typist.sock",
        "six": "https://[::1]:9093",
    }
    assert load({"http": {"instances": instances}}).feed.http.instances == {
        "master": HttpPeer(TcpAddress("synapse_main", 9093), tls=True),
        "typist": HttpPeer(UnixAddress(Path("/run/typist.sock"))),
        "six": HttpPeer(TcpAddress("::1", 9093), tls=True),
    }
