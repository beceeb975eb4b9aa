"""The configuration: what it accepts, what it says when it does not, and who set what."""

import ipaddress
import re
import textwrap
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import make_url

from fedsender.config import (
    Config,
    ConfigError,
    Federation,
    TcpAddress,
    UnixAddress,
    database_url,
    from_values,
    load,
    loads,
    read_secret,
)
from fedsender.config.document import MAX_BYTES
from fedsender.config.policy import JITTER, MAX_DAILY_ATTEMPTS, Backoff, Section
from fedsender.config.values import parse_address, parse_duration, parse_size

EXAMPLE = Path(__file__).parent.parent / "config.example.yaml"
DIRECTORY = Path("/etc/fedsender")
MINIMAL = "server_name: a.example\nsigning_key: key\n"


def config(text: str = "") -> Config:
    """The configuration with what must be set, and `text`."""
    return loads(MINIMAL + textwrap.dedent(text), directory=DIRECTORY, file="f.yaml")


def problems(text: str) -> list[str]:
    """What is wrong with a whole configuration, one line each."""
    with pytest.raises(ConfigError) as caught:
        loads(textwrap.dedent(text), directory=DIRECTORY, file="f.yaml")
    assert str(caught.value) == "\n".join(caught.value.problems)
    return list(caught.value.problems)


def problem(text: str) -> str:
    """The one thing wrong with what is added to the minimal configuration, from line 3 on."""
    (line,) = problems(MINIMAL + textwrap.dedent(text))
    return line


# --- The example ----------------------------------------------------------------------------------


def test_the_example_is_every_setting_at_its_default() -> None:
    example = load(EXAMPLE)
    minimal = from_values(
        {"server_name": "example.org", "signing_key": "signing.key"}, directory=EXAMPLE.parent
    )
    assert example.model_dump() == minimal.model_dump()
    assert set(_settings_of(yaml.safe_load(EXAMPLE.read_text()))) == set(_settings_in(Config))


def test_the_example_says_of_every_setting_what_the_model_says() -> None:
    comments = " ".join(EXAMPLE.read_text().replace("#", " ").split())
    for path, sentence in _settings_in(Config).items():
        assert sentence, f"{path} has no description"
        assert " ".join(sentence.split()) in comments, path


def test_the_first_file_in_the_example_works() -> None:
    """Its ten lines are a whole configuration; and a Synapse is followed over Redis by default."""
    lines = EXAMPLE.read_text().splitlines()
    first = [line.removeprefix("#   ") for line in lines if line.startswith("#   ")]
    config = from_values(yaml.safe_load("\n".join(first)), directory=EXAMPLE.parent)
    assert (config.homeserver.kind, config.feed.kind) == ("synapse", "redis")
    assert len(first) <= 10
    other = from_values(
        {
            "server_name": "a.example",
            "signing_key": "k",
            "homeserver": {"kind": "synapse", "database": "postgresql://h/d"},
            "feed": {"kind": "tcp"},
        },
        directory=EXAMPLE.parent,
    )
    assert other.feed.kind == "tcp"


def _settings_in(section: type[Section], prefix: str = "") -> dict[str, str]:
    """Every setting below a section, and its sentence."""
    found: dict[str, str] = {}
    for name, field in section.model_fields.items():
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        if isinstance(default, Section):
            found |= _settings_in(type(default), f"{prefix}{name}.")
        else:
            found[prefix + name] = field.description or ""
    return found


def _settings_of(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _settings_of(value, f"{prefix}{name}.")
        else:
            yield prefix + name


# --- What is refused, and how ---------------------------------------------------------------------


def test_every_problem_is_a_line_with_file_line_column_and_key() -> None:
    assert problems(
        """\
        server_name: a.example
        signing_key: 5
        sending:
          max_in_flight: many
          maximum: 3
        federation: {verify_certificates: no}
        """
    ) == [
        "f.yaml:2:14: signing_key: must be the path of a file",
        "f.yaml:6:35: federation.verify_certificates: must be true or false",
        "f.yaml:4:18: sending.max_in_flight: must be a whole number",
        "f.yaml:5:3: sending.maximum: unknown setting",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("log: {levle: info}", "3:7: log.levle: unknown setting (did you mean level?)"),
        ("feed: {tcp: {adress: x}}", "3:14: feed.tcp.adress: unknown setting (did you mean add"),
        ("destinations: {overrides: [{match: x, max_pdu: 3}]}", "(did you mean max_pdus?)"),
        ("metrik: 1", "3:1: metrik: unknown setting (did you mean metrics?)"),
        ("log: {level: loud}", "3:14: log.level: must be 'debug', 'info', 'warning' or 'error'"),
        ("allow: x.example", "3:8: allow: must be a list"),
        ("allow: [3]", "3:9: allow[0]: must be text"),
        ("deny: [bücher.example]", "3:8: deny[0]: must be ASCII: write an international name"),
        ("deny: ['https://b.example']", "3:8: deny[0]: must be a server name or a pattern"),
        ("deny: ['2001:db8::1']", "3:8: deny[0]: must be a server name or a pattern"),
        ("deny: ['']", "3:8: deny[0]: must be a server name or a pattern"),
        ("ledger: 5", "3:9: ledger: must hold settings"),
        ("ledger:", "3:8: ledger: must hold settings"),
        ("instance_name: a b", "3:16: instance_name: has characters that are not allowed"),
        ("sending: {max_in_flight: 0}", "sending.max_in_flight: must be greater than or equal"),
        ("sending: {max_in_flight: 1.5}", "sending.max_in_flight: must be a whole number"),
        ("sending: {max_in_flight: '5'}", "sending.max_in_flight: must be a whole number"),
        ("sending: {max_in_flight: 0x10}", "sending.max_in_flight: must be a whole number"),
        ("sending: {max_in_flight: 010}", "sending.max_in_flight: must be a whole number"),
        ("sending: {ramp_per_second: .inf}", "sending.ramp_per_second: must be a number"),
        ("sending: {drain: soon}", "must be a duration such as 30s"),
        ("sending: {drain: true}", "must be a duration such as 30s"),
        ("sending: {drain: 1:30}", "must be a duration such as 30s"),
        ("sending: {drain: -1}", "must be a duration between 0 and 10 years"),
        ("destinations: {defaults: {catch_up_gap_events: 401}}", "must be less than or equal to"),
        ("ledger: {keep_bytes: 10mb}", "must be a size such as 64KiB"),
        ("ledger: {directory: ''}", "must be the path of a file"),
        ("pipeline: {lake: 's3a://bucket/lake'}", "pipeline.lake: must be a path that this"),
        ("pipeline: {lake: 'hdfs://host/lake'}", "not a URL"),
        ("federation: {ip_deny: [10.0.0.1/8]}", "federation.ip_deny[0]: 10.0.0.1/8 has host bits"),
        ("federation: {nameservers: [ns.example]}", "nameservers[0]: "),
        ("federation: {proxy: {url: 'socks5://p:1'}}", "proxy.url: must be a URL such as http://"),
        ("federation: {proxy: {url: 'http://p'}}", "proxy.url: must be a URL such as http://"),
        ("federation: {proxy: {url: 'http://p:1/x'}}", "proxy.url: must be a URL such as http://"),
        ("federation: {proxy: {username: u}}", "proxy.username: has no use without a url"),
        ("federation: {proxy: {names: nowhere}}", "must be 'here', 'here_first' or 'proxy'"),
        (
            "federation: {proxy: {url: 'http://p:1', no_proxy: [a b]}}",
            "no_proxy[0]: must be a name",
        ),
        (
            "federation: {proxy: {url: 'http://p:1', no_proxy: ['*']}}",
            "no_proxy[0]: must be a name",
        ),
        (
            "federation: {proxy: {url: 'http://p:1', no_proxy: [10.0.0.256]}}",
            "no_proxy[0]: must be a name",
        ),
        ("federation: {proxy: {url: 'http://p:1', ca_file: x}}", "ca_file: is for a url of https:"),
        (
            "federation: {proxy: {url: 'http://p:1', username: u}}",
            "proxy.username: needs username and password_file together",
        ),
        (
            "federation: {proxy: {url: 'http://p:1', password_file: x}}",
            "proxy.password_file: needs username and password_file together",
        ),
        (
            "federation: {proxy: {url: 'http://p:1', username: 'u:x', password_file: x}}",
            "proxy.username: has characters that are not allowed",
        ),
        ("federation: {minimum_tls_version: 1.1}", "must be '1.2' or '1.3'"),
        ('federation: {user_agent_suffix: "a\\nb"}', "has characters that are not allowed"),
        ("feed: {tcp: {address: localhost}}", "must be an address such as"),
        ("feed: {relay: {name: sender-1}}", "feed.relay.name: is gone: all senders have one name"),
        ("ledger: {segment_bytes: 3GiB}", "segment_bytes: is gone: a file has 64 MiB"),
        ("feed: {redis: {host: redis.lan}}", "redis.host: is gone: address has it: address: local"),
        ("feed: {redis: {path: /r}}", "redis.path: is gone: address has it: address: unix:/path"),
        ("federation: {request_timeout: 2m}", "is gone: write destinations.defaults.request_time"),
        ("feed: {relay: {fetch_parallel: 8}}", "fetch_parallel: is gone: four connections fetch"),
        ("feed: {tcp: {address: 'unix:run/x'}}", "must be an address such as"),
        ("homeserver: {database: 'mysql://h/d'}", "must be a path, or a URL of"),
        (
            "destinations: {overrides: [{max_pdus: 3}]}",
            "3:28: destinations.overrides[0].match: mus",
        ),
        ("destinations: {defaults: {max_pdus: 51}}", "must be less than or equal to 50"),
        (
            "destinations: {overrides: [{match: x, backoff: {jitter: 0.1}}]}",
            "overrides[0].backoff.jitter: is gone: a wait is up to 20 % longer or shorter",
        ),
        ("destinations: {defaults: {priority: 1}}", "is gone: at a start those go first that were"),
        ("destinations: {defaults: {address: 'a.example:1'}}", "defaults.address: "),
        ("server_name: b.example", "3:1: server_name: already set in line 1"),
        ("log: {level: info, level: info}", "3:20: log.level: already set in line 3"),
        ("log: !!python/object/apply:os.system ['true']", "is not allowed"),
        ("log: !!set {a}", "3:6: log: tag 'tag:yaml.org,2002:set' is not allowed"),
        ("5: x", "3:1: a key must be text"),
        ("[a]: x", "3:1: a key must be text"),
        ("log: {<<: {level: info}}", "log.<<: unknown setting"),
    ],
)
def test_one_mistake_is_one_clear_line(text: str, expected: str) -> None:
    line = problem(text)
    assert line.startswith("f.yaml:3:")
    assert expected in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "f.yaml:1:1: server_name: must be set"),
        ("- a", "f.yaml:1:1: the file must be a mapping of settings"),
        ("a: [b", "f.yaml:1:6: not YAML: "),
        ("a: b: c", "f.yaml:1:5: not YAML: "),
        ("a: \t- b\n\tc", "f.yaml:"),
        ("a: \x00", "f.yaml:1:1: not YAML: "),
        ("a: 1\n---\nb: 2", "f.yaml:2:1: not YAML: "),
        ("a: *nobody", "f.yaml:1:4: not YAML: "),
        ("[" * 100_000, "f.yaml:1:1: nested deeper than 20 levels"),
        ("a: &a [*a]", "nested deeper than 20 levels"),
        (
            "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
            + "".join(
                f"{n}: &{n} [{', '.join([f'*{m}'] * 10)}]\n"
                for m, n in zip("abcdefgh", "bcdefghi", strict=True)
            ),
            "too much is built from aliases",
        ),
    ],
)
def test_what_is_no_plain_yaml_is_refused(text: str, expected: str) -> None:
    assert expected in problems(text)[0]


@pytest.mark.parametrize(
    ("text", "place", "expected"),
    [
        ("admin: {listen: '0.0.0.0:9009'}", "3:17", "must be a loopback IP or a Unix socket"),
        ("admin: {listen: 'localhost:9009'}", "3:17", "must be a loopback IP or a Unix socket"),
        ("admin: {listen: '[::ffff:8.8.8.8]:1'}", "3:17", "must be a loopback IP or a Unix socket"),
        (
            "homeserver: {kind: synapse}\nfeed: {kind: redis}",
            "3:13",
            "must be set when kind is synapse",
        ),
        ("homeserver: {state_database: x}", "3:30", "is for kind synapse only"),
        ("homeserver: {event_writers: [a, a]}", "3:29", "names one instance twice"),
        ("feed: {kind: redis}", "3:14", "homeserver.kind embedded needs push, tcp"),
        (
            "homeserver: {kind: synapse, database: hs.db, event_writers: [a, b]}\n"
            "feed: {kind: tcp}",
            "3:61",
            "must be one with feed.kind tcp",
        ),
        ("sender_database: homeserver.sqlite3", "3:18", "needs a file of its own"),
        (
            "homeserver: {database: sub/../x.db}\nsender_database: sqlite:///x.db",
            "4:18",
            "is homeserver.database, too",
        ),
        ("feed: {kind: relay}", "3:7", "feed.relay.secret_file: must be set"),
        (
            "feed: {redis: {address: 'unix:/r', tls: true}}",
            "3:41",
            "cannot be used on a Unix socket",
        ),
        ("feed: {redis: {ca_file: /ca}}", "3:25", "has no use without tls: true"),
        ("feed: {relay: {ca_file: /ca}}", "3:25", "has no use without tls: true"),
        ("feed: {redis: {username: u}}", "3:26", "needs a password_file"),
        (
            "homeserver: {federation_sender_instances: [fed1]}",
            "3:43",
            "does not name 'fedsender', our instance_name",
        ),
        ("sending: {max_in_flight: 2501}", "3:26", "is larger than federation.max_connections"),
        (
            "federation: {verify_certificates: false, ca_file: ca}",
            "3:51",
            "has no use with verify_certificates: false",
        ),
        (
            "destinations: {defaults: {backoff: {ceiling: 1m}}}",
            "3:36",
            "first <= ceiling_healthy <= ceiling does not hold",
        ),
    ],
)
def test_contradictions_are_refused_where_they_stand(text: str, place: str, expected: str) -> None:
    line = problem(text)
    assert line.startswith(f"f.yaml:{place}: ")
    assert expected in line


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    for url in (
        "postgresql://u:hunter2@h/d",
        "postgresql://u:hunter2/x@h/d",
        "postgresql:///d?user=u&password=hunter2",
        "postgresql:///d?sslpassword=hunter2",
        "postgresql:///d?PASSWORD=hunter2",
        "postgresql:///d?user=u&pass%77ord=hunter2",
        "postgresql://u:x?hunter2@h/d",
        "postgresql://u?x:hunter2@h/d",
    ):
        line = problem(f"sender_database: '{url}'")
        assert "must not hold a password" in line
        assert "hunter2" not in line


def test_a_file_that_cannot_be_read_is_one_clear_line(tmp_path: Path) -> None:
    for name, content, expected in (
        ("nowhere", None, "cannot be read: No such file or directory"),
        ("large", b"#" * (MAX_BYTES + 1), "larger than 1048576 bytes"),
        ("latin", b"a: b\nc: \xe4", ":2:1: not UTF-8"),
    ):
        file = tmp_path / name
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            load(file)
        assert str(caught.value).startswith(str(file))
        assert expected in str(caught.value)


@given(st.text())
def test_rubbish_is_a_configuration_error_and_nothing_else(text: str) -> None:
    with pytest.raises(ConfigError):
        loads(text, directory=DIRECTORY)


# --- Values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        *[("30s", 30), ("5m", 300), ("1h30m", 5_400), ("7d", 604_800), ("2w", 1_209_600)],
        *[("250ms", 0.25), ("1.5h", 5_400), (90, 90), (0.5, 0.5), (0, 0)],
    ],
)
def test_durations_are_seconds(value: object, seconds: float) -> None:
    assert parse_duration(value) == seconds


@pytest.mark.parametrize("value", ["", "s", "30", "30 s", "1h30", "-5s", "11y", "1e9s", None, True])
def test_what_is_no_duration_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="must be a duration"):
        parse_duration(value)


@pytest.mark.parametrize(
    ("value", "size"),
    [("10MiB", 10 * 2**20), ("64KiB", 65_536), ("2 GiB", 2**31), ("5kB", 5_000), ("7", 7), (8, 8)],
)
def test_sizes_are_bytes(value: object, size: int) -> None:
    assert parse_size(value) == size


@pytest.mark.parametrize("value", ["", "MiB", "1.5MiB", "10mib", "10K", "kiB", "5kiB", -1.0, True])
def test_what_is_no_size_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="must be a size"):
        parse_size(value)


def test_addresses_are_read_and_written_alike() -> None:
    for text, address in (
        ("127.0.0.1:9092", TcpAddress("127.0.0.1", 9092)),
        ("[::1]:9092", TcpAddress("::1", 9092)),
        ("redis.internal:1", TcpAddress("redis.internal", 1)),
        ("unix:/run/x.sock", UnixAddress(Path("/run/x.sock"))),
    ):
        assert parse_address(text) == address
        assert str(address) == text
    with pytest.raises(ValueError, match="107 bytes"):
        parse_address("unix:/" + "x" * 107)


def test_only_the_admin_endpoint_may_take_any_free_port() -> None:
    assert config("admin: {listen: '127.0.0.1:0'}").admin.listen == TcpAddress("127.0.0.1", 0)
    assert config("admin: {listen: '[::1]:0'}").admin.listen == TcpAddress("::1", 0)
    mapped = config("admin: {listen: '[::ffff:127.0.0.1]:0'}").admin.listen
    assert mapped == TcpAddress("::ffff:127.0.0.1", 0)
    assert "must be an address" in problem("feed: {tcp: {address: '127.0.0.1:0'}}")
    assert "must be a loopback" in problem("admin: {listen: '0.0.0.0:0'}")


def test_files_are_relative_to_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "sub" / "fedsender.yaml"
    file.parent.mkdir()
    file.write_text(MINIMAL + "ledger: {directory: ../l}\nhomeserver: {database: /var/h.db}\n")
    loaded = load(file)
    assert loaded.signing_key == file.parent / "key"
    assert loaded.ledger.directory == file.parent / "../l"
    assert loaded.homeserver.database == "sqlite:////var/h.db"
    # Defaults are too.
    assert loaded.sender_database == f"sqlite:///{file.parent}/fedsender.sqlite3"


def test_databases_are_given_as_sqlalchemy_wants_them() -> None:
    for given_, url in (
        ("sqlite:///own.db", "sqlite:////etc/fedsender/own.db"),
        ("sqlite:////var/own.db", "sqlite:////var/own.db"),
        ("postgresql://u@h:5/d?sslmode=require", "postgresql+psycopg://u@h:5/d?sslmode=require"),
        ("postgresql+psycopg:///d?host=/run", "postgresql+psycopg:///d?host=/run"),
    ):
        assert config(f"sender_database: '{given_}'\n").sender_database == url


def test_secrets_may_come_from_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "admin: {token_file: $CREDENTIALS_DIRECTORY/admin.token}\n"
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    # For who is not started by systemd they are beside the configuration.
    assert config(text).admin.token_file == Path("/etc/fedsender/admin.token")
    # Empty is not the directory that the command happens to run in.
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", "")
    assert config(text).admin.token_file == Path("/etc/fedsender/admin.token")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", "/run/credentials/x")
    assert config(text).admin.token_file == Path("/run/credentials/x/admin.token")


def test_our_own_addresses_are_one_of_each_family() -> None:
    both = config('federation: {source_addresses: ["192.0.2.7", "2001:db8::7"]}')
    assert [str(ip) for ip in both.federation.source_addresses] == ["192.0.2.7", "2001:db8::7"]
    for text, expected in (
        ('["192.0.2.7", "192.0.2.8"]', "must be of two families"),
        ("[hs.example]", "does not appear to be an IPv4 or IPv6 address"),
        ("[10]", "must be an IP, in quotes"),
    ):
        assert expected in problem(f"federation: {{source_addresses: {text}}}")


def test_the_name_and_each_secret_may_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So the file of several senders in containers is the same for all, and is no template."""
    text = (
        "instance_name: env:POD\nsender_database_password_file: env:PASSWORD\n"
        "admin: {token_file: env:TOKEN}\n"
    )
    monkeypatch.setenv("PASSWORD", "x")
    monkeypatch.setenv("TOKEN", "0123456789abcdef\n")
    monkeypatch.delenv("POD", raising=False)
    assert "instance_name: the environment has no variable POD" in problem(text)
    monkeypatch.setenv("POD", "synapse-fed-sender-1")
    monkeypatch.delenv("PASSWORD")
    assert "the environment has no variable PASSWORD" in problem(text)
    monkeypatch.setenv("PASSWORD", "x")
    its = config(text)
    assert its.instance_name == "synapse-fed-sender-1"
    assert its.admin.token_file is not None
    assert read_secret(its.admin.token_file) == "0123456789abcdef"
    assert its.file_problems("admin", "sender_database_password_file") == []
    for value, expected in (("", "is empty"), ("a\nb", "more than one line")):
        monkeypatch.setenv("TOKEN", value)
        with pytest.raises(ConfigError, match=f"env:TOKEN: .*{expected}") as told:
            read_secret(its.admin.token_file)
        assert "a\n" not in str(told.value)
    monkeypatch.setenv("POD", "a b")
    assert "has characters that are not allowed here" in problem(text)
    # OpenSSL reads a private key from a file alone.
    relay = config("relay: {certificate_file: c, private_key_file: env:TOKEN}\n").relay
    assert relay.private_key_file == Path("/etc/fedsender/env:TOKEN")


BESIDE = {
    "federation.proxy.password_file": {
        "federation.proxy.url": "https://p:1",
        "federation.proxy.username": "u",
    },
    "homeserver.state_database_password_file": {
        "homeserver.kind": "synapse",
        "homeserver.database": "postgresql+psycopg://u@h/d",
        "homeserver.state_database": "postgresql+psycopg://u@h/state",
    },
}
"""What a setting needs beside it."""
SECRETS = [
    *(path for path in _settings_in(Config) if re.search("(password|secret|token)_file$", path)),
    "signing_key",
]


@pytest.mark.parametrize("path", SECRETS)
def test_the_environment_may_have_each_secret(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, Any] = yaml.safe_load(MINIMAL)
    for name, value in {path: "env:SECRET", **BESIDE.get(path, {})}.items():
        *sections, last = name.split(".")
        reduce(lambda inner, each: inner.setdefault(each, {}), sections, values)[last] = value
    monkeypatch.delenv("SECRET", raising=False)
    assert problems(yaml.safe_dump(values))[0].endswith("the environment has no variable SECRET")
    monkeypatch.setenv("SECRET", "0123456789abcdef\n")
    its: Any = reduce(getattr, path.split("."), loads(yaml.safe_dump(values), directory=DIRECTORY))
    assert read_secret(its) == "0123456789abcdef"


def test_a_database_password_goes_into_the_url_whatever_it_is(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("p@ss:w/rd%é\n")
    url = database_url("postgresql+psycopg://u@h/d", file)
    assert make_url(url).password == "p@ss:w/rd%é"
    assert make_url(url).username == "u"
    url = database_url("postgresql+psycopg://u@h/d?application_name=a@b", file)
    assert make_url(url).password == "p@ss:w/rd%é"
    assert make_url(url).query == {"application_name": "a@b"}
    assert database_url("sqlite:////x.db", file) == "sqlite:////x.db"
    assert database_url("postgresql+psycopg://u@h/d", None) == "postgresql+psycopg://u@h/d"
    with pytest.raises(ConfigError, match="needs a user in its URL"):
        database_url("postgresql+psycopg:///d", file)


def test_a_secret_is_its_files_text_or_a_clear_error(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b" two words \r\n")
    assert read_secret(file) == " two words "
    for content, expected in (
        (b"\n", "is empty"),
        (b"  \n", "is empty"),
        (b"\xff", "not UTF-8"),
        (b"# what it is for\nthe secret\n", "more than one line"),
        (b"the\0secret", "a control character"),
        (b"x" * 70_000, "larger than 65536 bytes"),
    ):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=expected) as caught:
            read_secret(file)
        assert "the secret" not in str(caught.value)
    for path, expected in ((tmp_path, "Is a directory"), (tmp_path / "no", "No such file")):
        with pytest.raises(ConfigError, match=expected):
            read_secret(path)


def test_missing_secrets_are_named_with_the_line_that_wants_them(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(MINIMAL + "admin: {token_file: token}\nfeed: {kind: tcp}\n")
    (tmp_path / "key").write_text("ed25519 a x")
    (line,) = load(file).file_problems()
    assert line.startswith(f"{file}:3:21: admin.token_file: {tmp_path}/token: cannot be read")


def test_private_addresses_are_denied_in_every_disguise_and_allowed_by_exception() -> None:
    federation = Federation()
    for address in (
        *("127.0.0.1", "10.1.2.3", "169.254.169.254", "0.0.0.0", "255.255.255.255", "::", "::1"),
        *("fe80::1", "fd00::1", "::ffff:127.0.0.1", "64:ff9b::10.0.0.1", "2002:7f00:1::"),
        *("::127.0.0.1", "2001:db8::1", "ff02::1", "100.64.0.1"),
        # NAT64 of one's own, IPv4-translated, ISATAP, Teredo with its server and its client.
        *("64:ff9b:1::10.0.0.1", "::ffff:0:127.0.0.1", "2a01:4f8::5efe:10.0.0.1"),
        *("2a01:4f8::200:5efe:127.0.0.1", "2001:0:7f00:1::1", "2001:0:808:808::80ff:fffe"),
        # Discard-only, benchmarks, ORCHID, documentation, segment routing, Azure's own services.
        *("100::1", "2001:2::1", "2001:10::1", "2001:20::1", "3fff::1", "5f00::1"),
        *("168.63.129.16", "::ffff:168.63.129.16", "4000::1", "8000::1"),
    ):
        assert not federation.ip_ranges.permit(address), address
    for address in ("8.8.8.8", "2606:4700::1", "2002:808:808::", "64:ff9b::8.8.8.8"):
        assert federation.ip_ranges.permit(address), address
    local = config("federation: {ip_allow: [127.0.0.0/8]}").federation
    assert local.ip_ranges.permit("127.0.0.1")
    assert local.ip_ranges.permit("::ffff:127.0.0.1")
    assert not local.ip_ranges.permit("10.0.0.1")
    for text in ("localhost", "127.1", "fe80::1%eth0", ""):
        assert not federation.ip_ranges.permit(text)


@given(st.ip_addresses())
def test_what_is_not_on_the_internet_is_denied(
    ip: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    """As Python's copy of IANA's registries has it, which differs between versions."""
    # An address of 6to4 is as good as the one that it carries.
    carried = (ip.ipv4_mapped or ip.sixtofour) if isinstance(ip, ipaddress.IPv6Address) else None
    assert (carried or ip).is_global or not Federation().ip_ranges.permit(str(ip))


def test_an_exception_counts_for_each_address_that_another_carries() -> None:
    # A Teredo address carries two, of which the peer chooses both.
    text = "federation: {ip_allow: [127.0.0.0/8, '2001::/32', '64:ff9b:1::/48', '::1']}"
    federation = config(text).federation
    assert federation.ip_ranges.permit("::1")
    assert federation.ip_ranges.permit("64:ff9b:1::8.8.8.8")
    assert federation.ip_ranges.permit("2001:0:7f00:1::80ff:fffe")
    assert not federation.ip_ranges.permit("2001:0:7f00:1::f5ff:fffe")
    assert not federation.ip_ranges.permit("64:ff9b:1::10.0.0.1")


# --- Whom we send to, and how ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "server", "allowed"),
    [
        ("", "b.example", True),
        ("", "a.example", False),
        ("allow: ['*.good']", "b.example", False),
        ("allow: ['*.good']", "x.good", True),
        ("deny: ['b.*']", "b.example", False),
        ("deny: [b.example]", "b.example:443", False),
        ("deny: [b.example]", "B.example.", False),
        ("deny: ['*.b.example']", "x.b.example.:443", False),
        ("deny: ['[2001:db8::1]']", "[2001:db8:0::1]:443", False),
        ("allow: [b.example]", "b.example:443", True),
        ("allow: [b.example]\ndeny: ['*.example']", "b.example", False),
        ("allow: [b.example]", "c.example", False),
        ("allow: []", "b.example", False),
    ],
)
def test_every_list_has_a_say_in_whom_we_send_to(text: str, server: str, allowed: bool) -> None:
    assert config(text).allows(server) is allowed


def test_senders_share_the_servers_by_synapses_hash() -> None:
    text = """\
        instance_name: {name}
        homeserver:
          federation_sender_instances: [fed1, fed2]
          database: postgresql://x/hs
        sender_database: postgresql://x/own
        feed: {{kind: tcp}}
        """
    first, second = (config(text.format(name=name)) for name in ("fed1", "fed2"))
    assert (first.handles("matrix.org"), second.handles("matrix.org")) == (False, True)
    assert (first.handles("1.2.3.4"), second.handles("1.2.3.4")) == (True, False)
    assert config().handles("matrix.org")


OVERRIDES = """\
    destinations:
      defaults:
        max_pdus: 40
        backoff: {ceiling: 12h}
      overrides:
        - match: "*.big.example"
          max_pdus: 10
          request_timeout: 2m
          backoff: {first: 30s}
          edus: {typing: false}
        - match: x.big.example
          max_pdus: 20
          address: "192.0.2.7:8448"
          backoff: {ceiling_healthy: 2h}
          edus: {presence: false}
        - match: "[::1]:8448"
          max_pdus: 7
    """


def test_later_overrides_win_setting_by_setting() -> None:
    configured = config(OVERRIDES)
    both = configured.policy_for("x.big.example")
    assert (both.max_pdus, both.request_timeout) == (20, 120)
    assert both.address == TcpAddress("192.0.2.7", 8448)
    assert (both.edus.typing, both.edus.presence, both.edus.receipts) == (False, False, True)
    # A back-off comes from one override as a whole, and what that leaves out from the defaults.
    assert both.backoff == Backoff(ceiling=43_200, ceiling_healthy=7200)

    one = configured.policy_for("y.big.example")
    assert (one.max_pdus, one.address) == (10, None)
    assert one.backoff == Backoff(first=30, ceiling=43_200)
    assert configured.policy_for("other.example") == configured.destinations.defaults
    assert configured.policy_for("[::1]:8448").max_pdus == 7


def test_every_setting_of_a_policy_names_the_line_that_set_it() -> None:
    lines = config(OVERRIDES).explain_policy("x.big.example")
    sources = {line.field: (line.value, line.source) for line in lines}
    assert sources["max_pdus"] == (20, "f.yaml:14")
    assert sources["max_transaction_bytes"] == (2**20, "default")
    assert sources["request_timeout"] == (120, "f.yaml:10")
    assert sources["backoff.first"] == (5, "default")
    assert sources["backoff.ceiling"] == (43_200, "f.yaml:6")
    assert sources["backoff.ceiling_healthy"] == (7200, "f.yaml:16")
    assert sources["edus.typing"] == (False, "f.yaml:12")
    assert sources["edus.presence"] == (False, "f.yaml:17")
    assert sources["edus.receipts"] == (True, "default")
    within = "destinations.defaults."
    assert {within + line.field for line in lines} == {
        name for name in _settings_in(Config) if name.startswith(within)
    }


@pytest.mark.slow
@given(
    steady_for=st.floats(0, 3600),
    first=st.floats(1, 7200),
    ceiling=st.floats(1, 86_400),
    draws=st.lists(st.tuples(st.floats(-1, 1), st.booleans()), min_size=70, max_size=70),
)
def test_no_draw_of_jitter_makes_more_attempts_than_the_worst_case(
    steady_for: float,
    first: float,
    ceiling: float,
    draws: list[tuple[float, bool]],
) -> None:
    """Whatever the server was like before, and in whatever way each attempt fails."""
    backoff = Backoff(
        steady_for=steady_for,
        first=first,
        ceiling_healthy=ceiling,
        ceiling=86_400,
    )
    attempts, elapsed = 1, 0.0
    for failures, (draw, was_well) in enumerate(draws):
        wait = backoff.wait(failures, elapsed, steady=was_well)
        elapsed += max(1.0, min(wait, ceiling) * (1 + JITTER * draw))
        if elapsed > 86_400 or attempts > MAX_DAILY_ATTEMPTS:
            break
        attempts += 1
    assert attempts <= backoff.daily_attempts()


def test_a_backoff_that_could_harass_a_dead_server_is_refused() -> None:
    """I5: at most 60 attempts in 24 h, also where an override only seems harmless."""
    assert Backoff().daily_attempts() == 59
    assert config("destinations: {defaults: {backoff: {first: 30m}}}")
    line = problem("destinations: {defaults: {backoff: {ceiling_healthy: 20m}}}")
    assert "more than 60 attempts in 24 h" in line
    line = problem(
        """\
        destinations:
          defaults: {backoff: {steady_for: 0, ceiling_healthy: 45m}}
          overrides: [{match: x.example, backoff: {steady_for: 2m}}]
        """
    )
    assert line.startswith("f.yaml:5:43: destinations.overrides[0].backoff: ")


@pytest.mark.parametrize("backoff", ["steady_for: 10m", "ceiling_healthy: 20m"])
def test_an_override_of_one_setting_is_checked_with_the_rest_of_the_defaults(backoff: str) -> None:
    line = problem(
        f"""\
        destinations:
          overrides: [{{match: x.example, backoff: {{{backoff}}}}}]
        """
    )
    assert "destinations.overrides[0].backoff: " in line
    assert "more than 60 attempts in 24 h" in line


def test_a_configuration_cannot_be_changed() -> None:
    configured = config()
    with pytest.raises(ValueError, match="frozen"):
        configured.sending.max_in_flight = 5
