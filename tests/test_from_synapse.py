"""From Synapse's files to a configuration of ours: all of it, no secret, one error at a time."""

import contextlib
import copy
import io
import re
import stat
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
import trustme
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import make_url
from tests.pages import ROOT
from tests.servers import Databases
from tests.synapse import guide

from fedsender.cli import run_command
from fedsender.config import Config, ConfigError, TcpAddress, UnixAddress, database_url, loads
from fedsender.config.from_synapse import Converted, from_synapse
from fedsender.config.values import HttpPeer, proxy_url

CANARY = "c4n4ry-"
Files = dict[str, Any]

HOMESERVER: dict[str, Any] = {
    "server_name": "hs.example:8448",
    "report_stats": False,
    "signing_key_path": "/data/hs.signing.key",
    "macaroon_secret_key": f"{CANARY}macaroon",
    "registration_shared_secret": f"{CANARY}registration",
    "listeners": [{"port": 8008, "type": "http", "resources": [{"names": ["client"]}]}],
    "database": {
        "name": "psycopg2",
        "txn_limit": 10_000,
        "args": {
            "user": "synapse",
            "password": f"{CANARY}d@tabase: %",
            "database": "synapse",
            "host": "db.internal",
            "port": 5433,
            "sslmode": "verify-full",
            "sslrootcert": "/etc/ssl/db.pem",
            "keepalives_idle": 10,
            "cp_min": 5,
            "cp_max": 10,
        },
    },
    "redis": {
        "enabled": True,
        "host": "redis.internal",
        "port": 6380,
        "username": "synapse",
        "password": f"{CANARY}redis",
        "dbid": 3,
        "use_tls": True,
        "ca_file": "/etc/ssl/redis.pem",
        "certificate_file": "/etc/ssl/us.pem",
        "private_key_file": "/etc/ssl/us.key",
    },
    "instance_map": {
        "main": {"host": "synapse_main", "port": 9093, "tls": True},
        "typist": {"path": "/run/synapse/typist.sock"},
        "ev1": {"host": "10.0.0.2", "port": 9094},
        "ev2": {"host": "::1", "port": 9095},
    },
    "stream_writers": {"events": ["ev1", "ev2"], "typing": "typist", "presence": ["ev2"]},
    "worker_replication_secret": f"{CANARY}replication",
    "send_federation": False,
    "federation_sender_instances": ["fed2", "fed1"],
    "federation_domain_whitelist": ["a.example", "b.example:8448"],
    "federation_metrics_domains": ["a.example"],
    "federation_verify_certificates": True,
    "federation_certificate_verification_whitelist": ["*.onion", "lab.example"],
    "federation_custom_ca_list": ["/etc/ssl/one.pem", "/etc/ssl/two.pem"],
    "federation_client_minimum_tls_version": "1.3",
    "ip_range_blacklist": ["10.0.0.1/8", "192.0.2.7", "fc00::/7"],
    "ip_range_whitelist": ["10.1.1.1"],
    "federation_rr_transactions_per_room_per_second": 20,
    "allow_device_name_lookup_over_federation": True,
    "user_agent_suffix": "ops@hs.example",
    "presence": {"enabled": True, "last_active_granularity": "2m"},
    "exclude_rooms_from_presence": ["!big:hs.example"],
    "federation": {
        "client_timeout": "90s",
        "destination_min_retry_interval": "5m",
        "destination_max_retry_interval": "3d",
        "destination_retry_multiplier": 3,
    },
}
WORKER = {"worker_app": "synapse.app.generic_worker", "worker_name": "fed1"}


def write(directory: Path, **files: Any) -> list[Path]:
    """Each as a YAML file; a text as it stands."""
    paths = []
    for name, content in files.items():
        path = directory / f"{name}.yaml"
        text = content if isinstance(content, str) else yaml.safe_dump(content)
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
        paths.append(path)
    return paths


def homeserver(**changes: Any) -> dict[str, Any]:
    """A small homeserver with one sender; None takes a setting out."""
    values: dict[str, Any] = {
        "server_name": "hs.example",
        "signing_key_path": "/data/hs.key",
        "database": {"name": "psycopg2", "args": {"user": "synapse", "dbname": "synapse"}},
        "redis": {"enabled": True},
        "instance_map": {"main": {"host": "127.0.0.1", "port": 9093}},
        "federation_sender_instances": ["fed1"],
    }
    values |= changes
    return {name: value for name, value in values.items() if value is not None}


def converted(directory: Path, *, instance: str | None = None, **files: Any) -> Converted:
    return from_synapse(write(directory, **files), instance=instance)


def config_of(made: Converted) -> Config:
    return loads(made.text, directory=Path("/etc/fedsender"))


def run(*arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_command([str(each) for each in arguments])
    return code, out.getvalue(), err.getvalue()


# --- a whole deployment ---------------------------------------------------------------------------


def test_everything_is_carried_over(tmp_path: Path) -> None:
    made = converted(tmp_path, homeserver=HOMESERVER, worker=WORKER)
    config = config_of(made)

    assert (config.server_name, config.instance_name) == ("hs.example:8448", "fed1")
    assert config.signing_key == Path("/data/hs.signing.key")
    hs = config.homeserver
    assert (hs.kind, hs.event_writers) == ("synapse", ("ev1", "ev2"))
    assert hs.federation_sender_instances == ("fed2", "fed1")
    assert config.allow == ("a.example", "b.example:8448")
    assert (hs.presence.last_active_granularity, hs.device_names) == (120.0, True)
    assert hs.presence.excluded_rooms == ("!big:hs.example",)
    redis = config.feed.redis
    assert (config.feed.kind, str(redis.address)) == ("redis", "redis.internal:6380")
    assert (redis.tls, redis.username) == (True, "synapse")
    assert redis.ca_file == Path("/etc/ssl/redis.pem")
    assert redis.private_key_file == Path("/etc/ssl/us.key")
    assert config.feed.http.instances == {
        "master": HttpPeer(TcpAddress("synapse_main", 9093), tls=True),
        "typist": HttpPeer(UnixAddress(Path("/run/synapse/typist.sock"))),
        "ev2": HttpPeer(TcpAddress("::1", 9095)),
    }
    federation = config.federation
    assert federation.ca_file == Path("/etc/ssl/one.pem")
    assert federation.more_ca_files == (Path("/etc/ssl/two.pem"),)
    assert federation.minimum_tls_version == "1.3"
    assert config.destinations.defaults.request_timeout == 90.0
    assert [str(each) for each in federation.ip_deny] == [
        "10.0.0.0/8",
        "192.0.2.7/32",
        "fc00::/7",
    ]
    assert federation.ip_ranges.permit("10.1.1.1")
    assert federation.user_agent_suffix == "ops@hs.example"
    assert config.metrics.per_destination == ("a.example",)
    backoff = config.policy_for("a.example").backoff
    assert (backoff.first, backoff.ceiling, backoff.ceiling_dead) == (300, 6 * 3600, 86_400)
    unchecked = [
        config.policy_for(name).verify_certificates
        for name in ("x.onion", "x.onion:8448", "lab.example", "lab.example:443", "a.example")
    ]
    assert unchecked == [False, False, False, False, None]


def test_secrets_are_named_by_file_and_said_without_their_value(tmp_path: Path) -> None:
    made = converted(tmp_path, homeserver=HOMESERVER, worker=WORKER)
    config = config_of(made)

    assert CANARY not in made.text + "".join(made.notes) + repr(made)
    assert config.homeserver.database_password_file == Path("/etc/fedsender/database-password")
    assert config.feed.redis.password_file == Path("/etc/fedsender/redis-password")
    assert config.feed.http.secret_file == Path("/etc/fedsender/worker-replication-secret")
    for setting in ("database.args.password", "redis.password", "worker_replication_secret"):
        assert any(note.startswith(f"{setting}: is a secret") for note in made.notes), setting


def test_secrets_that_synapse_has_in_files_stay_there(tmp_path: Path) -> None:
    redis = {"enabled": True, "password_path": "/run/secrets/redis"}
    args = {"user": "synapse", "dbname": "synapse", "passfile": "/run/secrets/pgpass"}
    made = converted(
        tmp_path,
        homeserver=homeserver(
            redis=redis,
            database={"name": "psycopg2", "args": args},
            worker_replication_secret_path="/run/secrets/replication",
        ),
    )
    config = config_of(made)

    assert config.feed.redis.password_file == Path("/run/secrets/redis")
    assert config.feed.http.secret_file == Path("/run/secrets/replication")
    assert "passfile=%2Frun%2Fsecrets%2Fpgpass" in config.homeserver.database
    assert not made.notes
    assert not made.secrets


def test_what_it_prints_passes_the_check_with_the_secrets_it_wrote(tmp_path: Path) -> None:
    """The whole command: one configuration on stdout, secrets in files for their owner alone."""
    key = tmp_path / "hs.key"
    key.write_text("ed25519 a_1 " + 43 * "A" + "\n")
    for name in ("us.pem", "us.key"):
        (tmp_path / name).write_text("x")
    for name in ("hs.key", "us.key"):
        (tmp_path / name).chmod(0o640)
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    files_of_redis = {"private_key_file": "us.key", "certificate_file": "us.pem"}
    changes = {
        "signing_key_path": "hs.key",
        "redis": HOMESERVER["redis"] | files_of_redis | {"ca_file": "ca.pem"},
        "federation_custom_ca_list": ["ca.pem"],
    }
    files = write(tmp_path, homeserver=HOMESERVER | changes, worker=WORKER)
    secrets = tmp_path / "secrets"

    code, out, err = run("config", "from-synapse", *files, "--secrets", secrets)
    assert (code, CANARY in out + err) == (0, False)
    config = tmp_path / "fedsender.yaml"
    config.write_text(out)
    assert run("config", "check", "-c", config) == (0, f"{config}: nothing wrong\n", "")
    written = {path.name: path.read_text() for path in secrets.iterdir()}
    assert written == {
        "database-password": f"{CANARY}d@tabase: %\n",
        "redis-password": f"{CANARY}redis\n",
        "worker-replication-secret": f"{CANARY}replication\n",
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets.iterdir()} == {0o600}


def test_all_that_the_daemon_writes_is_below_the_state_directory(tmp_path: Path) -> None:
    """A unit lets it write nowhere else; and the endpoint gets a token that nothing shows."""
    (tmp_path / "hs.key").write_text("ed25519 a_1 " + 43 * "A" + "\n")
    files = write(
        tmp_path,
        homeserver=homeserver(signing_key_path="hs.key", federation={"client_timeout": "90s"}),
    )
    state = tmp_path / "state"
    config = tmp_path / "etc" / "config.yaml"
    config.parent.mkdir()
    where = ("--secrets", config.parent, "--state", state, "--admin", "127.0.0.1:9009")

    code, out, err = run("config", "from-synapse", *files, *where)
    assert (code, err) == (0, "")
    config.write_text(out)
    assert run("config", "check", "-c", config)[0] == 0

    made = loads(out, directory=config.parent)
    assert made.sender_database == f"sqlite:///{state}/fedsender.sqlite3"
    assert made.ledger.directory == state / "ledger"
    assert made.destinations.defaults.request_timeout == 90
    token = config.parent / "admin.token"
    assert made.admin.token_file == token
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(token.read_text().strip()) >= 32
    assert token.read_text().strip() not in out + err


def test_what_could_not_be_carried_over_is_named(tmp_path: Path) -> None:
    federation = {"max_long_retries": 3, "destination_max_retry_interval": "1s"}
    hs = homeserver(
        federation=federation,
        outbound_federation_restricted_to=["other"],
        http_proxy="http://user:c4n4ry-proxy@proxy:1",
        presence={"presence_router": {"module": "x"}},
        federation_client_minimum_tls_version=1,
        instance_map=None,
    )
    code, out, err = run("config", "from-synapse", *write(tmp_path, homeserver=hs, worker=WORKER))

    assert code == 0
    assert CANARY not in out + err
    for setting in (
        "federation.max_long_retries",
        "federation.destination_*retry*",
        "http_proxy",
        "presence.presence_router",
        "federation_client_minimum_tls_version",
        "instance_map",
        "outbound_federation_restricted_to",
    ):
        assert f"fedsender: {setting}: " in err, setting
    assert "backoff" not in out


def test_a_proxy_is_carried_over_and_its_password_goes_into_a_file(tmp_path: Path) -> None:
    hs = homeserver(
        https_proxy="http://us%40r:c4n4ry%2Fproxy@proxy.example:3128/",
        no_proxy_hosts=["a.example", ".B.example", "10.1.2.3/16", "192.0.2.7", "bad name"],
    )
    files = write(tmp_path, homeserver=hs, worker=WORKER)
    secrets = tmp_path / "secrets"
    code, out, err = run("config", "from-synapse", *files, "--secrets", secrets)

    assert code == 0, err
    assert CANARY not in out + err
    proxy = loads(out, directory=tmp_path).federation.proxy
    assert str(proxy.url and proxy_url(proxy.url)) == "http://proxy.example:3128"
    assert proxy.username == "us@r"
    assert proxy.password_file == secrets / "proxy-password"
    assert proxy.password_file.read_text() == "c4n4ry/proxy\n"
    assert list(map(str, proxy.no_proxy)) == [
        *("a.example", ".a.example", "b.example", ".b.example", "10.1.0.0/16", "192.0.2.7/32")
    ]
    assert "no_proxy_hosts: 1 of it left out" in err
    assert "https_proxy: federation.ip_deny is judged here, too" in err


@pytest.mark.parametrize("named", [["fed1"], ["fed1", "fed2"], ["other", "fed1"]])
def test_requests_that_synapse_sends_through_the_old_worker_are_explained(
    tmp_path: Path, named: list[str]
) -> None:
    """On standard error and in the file, which is right all the same."""
    hs = homeserver(
        federation_sender_instances=["fed1", "fed2"],
        instance_map={"main": {"host": "main", "port": 1}, "fed1": {"host": "fed1", "port": 2}},
        worker_replication_secret=f"{CANARY}replication",
        outbound_federation_restricted_to=named,
    )
    code, out, err = run("config", "from-synapse", *write(tmp_path, homeserver=hs, worker=WORKER))

    assert (code, CANARY in out + err) == (0, False)
    assert loads(out, directory=tmp_path).instance_name == "fed1"
    comment = " ".join(line[2:] for line in out.splitlines() if line.startswith("# "))
    for said in (err, comment):
        assert "joins, key queries, media requests and backfill to other servers through" in said
        assert "Before you stop fed1, name a Synapse worker there that is no federation sen" in said
        assert 'docs/switching.md, "Other requests of Synapse"' in said
    assert max(map(len, out.splitlines())) <= 100


def test_requests_that_synapse_sends_through_another_worker_need_nothing(tmp_path: Path) -> None:
    """But what is checked on that way is not checked any more: a Secure Border Gateway's rules."""
    hs = homeserver(
        instance_map={"main": {"host": "main", "port": 1}, "gate": {"host": "sbg", "port": 9}},
        outbound_federation_restricted_to=["gate", "other"],
        worker_replication_secret=f"{CANARY}replication",
    )
    code, _, err = run("config", "from-synapse", *write(tmp_path, homeserver=hs, worker=WORKER))

    assert code == 0
    assert "only through gate (sbg:9), other; fedsender would pass it by" in err
    assert "If it is a Secure Border Gateway" in err


@pytest.mark.parametrize(
    ("setting", "url"),
    [
        ("proxy.example", "http://proxy.example:1080"),
        ("https://[2001:db8::1]:443", "https://[2001:db8::1]:443"),
        ("", None),
    ],
)
def test_a_proxy_without_a_port_or_a_scheme_is_read_as_synapse_reads_it(
    tmp_path: Path, setting: str, url: str | None
) -> None:
    hs = homeserver(https_proxy=setting)
    code, out, err = run("config", "from-synapse", *write(tmp_path, homeserver=hs, worker=WORKER))
    assert code == 0, err
    found = loads(out, directory=tmp_path).federation.proxy.url
    assert (None if found is None else proxy_url(found)) == url


def test_a_proxy_for_no_server_is_left_out_and_a_bad_one_is_an_error_without_its_value(
    tmp_path: Path,
) -> None:
    hs = homeserver(https_proxy="http://proxy:1", no_proxy_hosts=["*"])
    code, out, err = run("config", "from-synapse", *write(tmp_path, homeserver=hs, worker=WORKER))
    assert code == 0
    assert "proxy" not in out
    assert "https_proxy: is left out: no_proxy_hosts has *" in err
    hs = homeserver(https_proxy=f"socks5://u:{CANARY}@proxy:1")
    code, out, err = run("config", "from-synapse", *write(tmp_path, homeserver=hs, worker=WORKER))
    assert code != 0
    assert "https_proxy: must be a URL such as http://proxy.example:3128" in err
    assert CANARY not in out + err


# --- who we are -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "worker", "instance", "expected"),
    [
        ({}, {}, None, ("fed1", ("fed1",))),
        ({}, WORKER, None, ("fed1", ("fed1",))),
        ({"federation_sender_instances": ["a", "b"]}, {}, "b", ("b", ("a", "b"))),
        ({"federation_sender_instances": ["a"]}, {}, "b", ("b", ("a",))),
        ({"federation_sender_instances": ["master", "b"]}, {}, None, ("b", ("master", "b"))),
        ({"federation_sender_instances": ["master"]}, {}, None, ("fedsender", ("fedsender",))),
        ({"federation_sender_instances": None}, {}, None, ("fedsender", ("fedsender",))),
        ({"federation_sender_instances": None}, WORKER, None, ("fed1", ("fed1",))),
        ({"federation_sender_instances": []}, WORKER, None, ("fed1", ())),
    ],
)
def test_whose_place_is_taken(
    tmp_path: Path,
    changes: Files,
    worker: Files,
    instance: str | None,
    expected: tuple[str, tuple[str, ...]],
) -> None:
    made = converted(tmp_path, homeserver=homeserver(**changes), worker=worker, instance=instance)
    config = config_of(made)

    assert (config.instance_name, config.homeserver.federation_sender_instances) == expected
    main_sends = changes.get("federation_sender_instances", ["fed1"]) in (None, ["master"])
    assert any("main process sends itself" in note for note in made.notes) == main_sends


SQLITE = {"name": "sqlite3", "args": {"database": "/data/homeserver.db"}}


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({}, "Redis, instance_map, federation_sender_instances"),
        ({"federation_sender_instances": ["master"]}, "Redis, instance_map, federation_sender_in"),
        ({"redis": {"enabled": False}}, "Redis, instance_map, federation_sender_instances"),
        ({"database": SQLITE}, "PostgreSQL, Redis, instance_map, federation_sender_instances"),
        ({"database": SQLITE, "redis": {"enabled": True}}, "PostgreSQL, instance_map, federation"),
    ],
)
def test_a_synapse_without_workers_is_told_what_is_missing(
    tmp_path: Path, changes: Files, missing: str
) -> None:
    """In one sentence, with the page that has the steps."""
    bare = {"redis": None, "instance_map": None, "federation_sender_instances": None} | changes
    (path,) = write(tmp_path, homeserver=homeserver(**bare))
    code, out, err = run("config", "from-synapse", path)

    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"fedsender: {path}: Synapse's main process sends itself, and a sender")
    assert f"is missing here: {missing}" in err
    assert "docs/switching-single.md has the steps" in err


# --- databases ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "url", "password"),
    [
        (
            {"user": "u@x", "host": "/var/run/postgresql", "database": "s y"},
            "postgresql+psycopg://u%40x@?dbname=s+y&host=%2Fvar%2Frun%2Fpostgresql",
            None,
        ),
        (
            {"user": "u", "host": "a,b", "port": "1,2", "dbname": "s"},
            "postgresql+psycopg://u@/s?host=a%3A1&host=b%3A2",
            None,
        ),
        ({"user": "u", "host": "::1", "dbname": "s"}, "postgresql+psycopg://u@[::1]/s", None),
        (
            {"dsn": "postgresql://u:p%40w@db:77/s?sslmode=require"},
            "postgresql+psycopg://u@db:77/s?sslmode=require",
            "p@w",
        ),
        (
            {"dsn": "user=u password='p w' host=db", "dbname": "s"},
            "postgresql+psycopg://u@db/s",
            "p w",
        ),
        ({"database": "user=u password=pw dbname=s"}, "postgresql+psycopg://u@/s", "pw"),
        ({"user": "u", "password": 12345, "dbname": "s"}, "postgresql+psycopg://u@/s", "12345"),
    ],
)
def test_connection_settings_become_a_url_without_a_password(
    tmp_path: Path, args: Files, url: str, password: str | None
) -> None:
    made = converted(tmp_path, homeserver=homeserver(database={"name": "psycopg2", "args": args}))

    assert config_of(made).homeserver.database == url
    assert [secret.value for secret in made.secrets] == ([password] if password else [])


def test_several_senders_share_a_database_beside_synapses(tmp_path: Path) -> None:
    args = {"user": "u", "host": "/run/pg", "port": 5433, "database": "s y", "sslmode": "disable"}
    synapse = homeserver(
        database={"name": "psycopg2", "args": args}, federation_sender_instances=["fed1", "fed2"]
    )
    alone = synapse | {"federation_sender_instances": ["fed1"]}
    for files, name in ((synapse, "fed2"), (alone, "fed1"), (alone, "fed2")):
        made = converted(tmp_path, instance=name, homeserver=files)
        url = make_url(config_of(made).sender_database)
        assert (url.database, dict(url.query)) == (
            "fedsender",
            {"host": "/run/pg", "port": "5433", "sslmode": "disable"},
        )


def test_several_senders_of_a_synapse_on_sqlite_are_refused(tmp_path: Path) -> None:
    several = homeserver(database=SQLITE, federation_sender_instances=["fed1", "fed2"])
    paths = write(tmp_path, homeserver=several, worker=WORKER)
    code, out, err = run("config", "from-synapse", *paths)

    assert (code, out) == (2, "")
    text = "database: must be a PostgreSQL for several senders"
    assert err == f"fedsender: {paths[0]}: {text}\n"


def test_state_groups_in_a_database_of_their_own(tmp_path: Path) -> None:
    databases = {
        "one": {
            "name": "psycopg2",
            "data_stores": ["main"],
            "args": {"user": "u", "password": "m", "dbname": "main"},
        },
        "two": {
            "name": "psycopg2",
            "data_stores": ["state"],
            "args": {"user": "v", "password": "s", "dbname": "state"},
        },
    }
    made = converted(tmp_path, homeserver=homeserver(database=None, databases=databases))
    hs = config_of(made).homeserver

    assert (hs.database, hs.state_database) == (
        "postgresql+psycopg://u@/main",
        "postgresql+psycopg://v@/state",
    )
    assert hs.state_database_password_file == Path("/etc/fedsender/state-database-password")
    assert {each.setting: each.value for each in made.secrets} == {
        "databases.one.args.password": "m",
        "databases.two.args.password": "s",
    }


def test_the_url_reaches_the_same_database(tmp_path: Path, postgres: Databases) -> None:
    """With a password that means something in a URL, and a setting of libpq's."""
    server = postgres.server
    args = {
        "user": server.user,
        "password": "p:/?#@ %",
        "host": server.host,
        "port": server.port,
        "dbname": "postgres",
        "options": "-c search_path=some_where,public",
    }
    files = write(tmp_path, homeserver=homeserver(database={"name": "psycopg2", "args": args}))
    _, out, _ = run("config", "from-synapse", *files, "--secrets", tmp_path / "s")
    hs = loads(out, directory=tmp_path).homeserver
    engine = sqlalchemy.create_engine(database_url(hs.database, hs.database_password_file))

    with engine.connect() as connection:
        assert connection.scalar(sqlalchemy.text("SHOW search_path")) == "some_where,public"
    engine.dispose()


# --- what is wrong with files ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({"homeserver": "a: [1"}, "not YAML"),
        ({"homeserver": "- a"}, "must be a mapping of settings"),
        ({"homeserver": ""}, "must be a mapping of settings"),
        ({"homeserver": "1: 2"}, "must be a mapping of settings"),
        ({"homeserver": "password: !c4n4ry-tag x"}, "line 1: not YAML"),
        ({"homeserver": "password: *c4n4ry-alias"}, "line 1: not YAML"),
        ({"homeserver": "a: !!timestamp c4n4ry-"}, "not YAML"),
        ({"homeserver": "[" * 5000}, "not YAML"),
        ({"homeserver": homeserver(server_name=None)}, "server_name: must be set"),
        ({"homeserver": homeserver(server_name="not a name")}, "server_name: must be set"),
        ({"homeserver": homeserver(redis=None)}, "redis.enabled: must be true"),
        ({"homeserver": homeserver(redis={"enabled": "yes"})}, "redis.enabled: must be true or f"),
        ({"homeserver": homeserver(redis={"enabled": True, "port": 0})}, "redis.port: must be a"),
        ({"homeserver": homeserver(redis=[CANARY])}, "redis: must hold settings"),
        (
            {
                "homeserver": homeserver(
                    redis={"enabled": True, "password": CANARY, "password_path": "/x"}
                )
            },
            "redis.password: stands beside password_path",
        ),
        ({"homeserver": homeserver(redis={"enabled": True, "username": "u"})}, "needs a password"),
        ({"homeserver": homeserver(database=None)}, "database: must be set"),
        ({"homeserver": homeserver(database={"name": "mysql"})}, "database.name: must be psycopg2"),
        (
            {
                "homeserver": homeserver(
                    database={"name": "psycopg2", "args": {"dsn": f"={CANARY}"}}
                )
            },
            "database.args.dsn: is not a connection string",
        ),
        (
            {
                "homeserver": homeserver(
                    database={"name": "psycopg2", "args": {"host": f"u:{CANARY}@h"}}
                )
            },
            "database.args.host: is not a host",
        ),
        (
            {"homeserver": homeserver(database={"name": "psycopg2", "args": {"password": CANARY}})},
            "database.args.user: must be set",
        ),
        ({"homeserver": homeserver(databases={"a": {}})}, "databases: stands beside database"),
        (
            {"homeserver": homeserver(federation_sender_instances=["a", "b"])},
            "federation_sender_instances: names several workers",
        ),
        (
            {"homeserver": homeserver(), "worker": {"worker_name": "other"}},
            "federation_sender_instances: does not name other",
        ),
        (
            {"homeserver": homeserver(), "a": WORKER, "b": WORKER | {"worker_name": "fed2"}},
            "are of different workers",
        ),
        (
            {"homeserver": homeserver(stream_writers={"typing": "fed1"})},
            "stream_writers.typing: names fed1, which only sends",
        ),
        (
            {"homeserver": homeserver(pusher_instances=["fed1"])},
            "pusher_instances: names fed1, which only sends",
        ),
        ({"homeserver": homeserver(ip_range_blacklist=[CANARY])}, "must be a list of IPs"),
        (
            {"homeserver": homeserver(federation={"client_timeout": "soon"})},
            "federation.client_timeout: must be a duration",
        ),
        ({"homeserver": homeserver(instance_map={"main": {}})}, "instance_map.main.host: must be"),
    ],
)
def test_a_broken_file_is_one_error_that_names_file_and_setting(
    tmp_path: Path, files: Files, error: str
) -> None:
    paths = write(tmp_path, **files)
    code, out, err = run("config", "from-synapse", *paths)

    assert (code, out, err.count("\n")) == (2, "", 1)
    assert error in err
    assert str(paths[0]) in err or "different workers" in err
    assert CANARY not in err


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    code, _, err = run("config", "from-synapse", tmp_path / "none.yaml")
    assert (code, err) == (2, f"fedsender: {tmp_path}/none.yaml: cannot be read: {MISSING}\n")


MISSING = "No such file or directory"

# --- mutations ------------------------------------------------------------------------------------

SECRETS = ("password", "worker_replication_secret", "macaroon_secret_key", "sslpassword", "dsn")
Path_ = tuple[str | int, ...]


def places(value: Any, at: Path_ = ()) -> list[Path_]:
    """Every place in a document."""
    found = [at] if at else []
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        found += places(item, (*at, key))
    return found


def changed(document: Any, at: Path_, change: Callable[[Any], Any]) -> Any:
    """A copy with `change` made to the value at a place; DROP takes it out."""
    made = copy.deepcopy(document)
    holder = made
    for key in at[:-1]:
        if not isinstance(holder, dict | list):
            return made
        try:
            holder = holder[key]  # type: ignore[index,call-overload,unused-ignore]
        except (LookupError, TypeError):
            return made
    try:
        holder[at[-1]] = change(holder[at[-1]])
        if holder[at[-1]] is DROP and isinstance(holder, dict):
            del holder[at[-1]]
    except (LookupError, TypeError):
        pass
    return made


DROP = None
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=12),
    st.dates(),
    st.binary(max_size=5),
    st.lists(st.one_of(st.text(max_size=5), st.integers()), max_size=3),
    st.dictionaries(st.one_of(st.text(max_size=5), st.integers()), st.text(max_size=5), max_size=3),
    st.sampled_from(["10m", "::", "a" * 300, "~/x", "$CREDENTIALS_DIRECTORY/x", "main", "master"]),
)
WHOLE = HOMESERVER | {"signing_key": f"ed25519 a_1 {CANARY}key"}
WHOLE["database"] = copy.deepcopy(HOMESERVER["database"])
WHOLE["database"]["args"]["sslpassword"] = f"{CANARY}ssl"


@pytest.mark.slow
@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    changes=st.lists(st.tuples(st.sampled_from(places(WHOLE)), JUNK, st.booleans()), max_size=4),
    secrets=st.sampled_from([None, "dsn", "list", "mapping"]),
)
def test_whatever_the_settings_are_no_secret_is_said_and_nothing_breaks(
    tmp_path: Path, changes: list[tuple[Path_, Any, bool]], secrets: str | None
) -> None:
    """Any setting may be anything: a configuration that is right, or one line that says why not."""
    document = WHOLE
    if secrets == "dsn":
        dsn = f"postgresql://u:{CANARY}dsn@h/d?sslpassword={CANARY}"
        document = changed(document, ("database", "args"), lambda args: args | {"dsn": dsn})
    elif secrets is not None:
        wrap: Callable[[Any], Any] = (lambda x: [x]) if secrets == "list" else (lambda x: {x: x})
        for at in places(WHOLE):
            if at[-1] in SECRETS:
                document = changed(document, at, wrap)
    for at, junk, _ in changes:
        document = changed(document, at, lambda _, junk=junk: junk)  # type: ignore[misc]
    try:
        files = write(tmp_path, homeserver=document, worker=WORKER)
    except (UnicodeEncodeError, yaml.YAMLError):
        return

    code, out, err = run("config", "from-synapse", *files)
    assert CANARY not in out + err
    if code == 0:
        loads(out, directory=tmp_path)
    else:
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert "the configuration made of them" not in err


TEXT = yaml.safe_dump(WHOLE)


@pytest.mark.slow
@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    start=st.integers(0, len(TEXT)),
    length=st.integers(0, 40),
    new=st.one_of(
        st.text(max_size=6), st.sampled_from(["\t", "&a ", "*a", "!!int ", "? ", "<<: "])
    ),
)
def test_a_damaged_file_is_never_a_traceback(
    tmp_path: Path, start: int, length: int, new: str
) -> None:
    text = TEXT[:start] + new + TEXT[start + length :]
    path = tmp_path / "damaged.yaml"
    path.write_bytes(text.encode(errors="replace"))
    worker = write(tmp_path, worker=WORKER)
    made, problems = None, ["none"]
    try:
        made = from_synapse([path, *worker])
    except ConfigError as error:
        problems = list(error.problems)
    assert len(problems) == 1
    assert "the configuration made of them" not in problems[0]
    if made is not None:
        config_of(made)


def test_the_synapse_of_the_tutorial_is_one_to_switch(tmp_path: Path) -> None:
    """Its files as the page writes them; the variables are those of the page that it leads to."""
    page = (ROOT / "docs/tutorial.md").read_text()
    blocks = [
        textwrap.dedent(each) for each in re.findall(r"^ +```sh\n(.*?)^ +```$", page, re.M | re.S)
    ]
    [write_files] = [each for each in blocks if "cat > /etc/synapse/both.yaml" in each]
    [lines] = [each for each in blocks if each.startswith("HOMESERVER=")]
    values = dict(line.split("=", 1) for line in lines.splitlines())
    assert list(values) == guide.variables(guide.GUIDE)
    here = write_files.replace("/etc/synapse", str(tmp_path)).replace("chown", ": chown")
    subprocess.run(["sh", "-eu", "-c", here], check=True, capture_output=True)
    files = [tmp_path / Path(values[name]).name for name in ("HOMESERVER", "CONF_D", "WORKER")]

    code, out, _ = run("config", "from-synapse", *files, "--secrets", tmp_path, "--state", tmp_path)
    config = loads(out, directory=tmp_path)

    assert code == 0
    assert (config.server_name, config.instance_name) == ("127.0.0.1:8448", "fed1")
    assert (config.federation.ca_file, config.federation.ip_deny) == (tmp_path / "tls.crt", ())
    url = make_url(config.homeserver.database)
    assert (url.username, url.database) == ("synapse", "synapse")
    assert url.query["host"] == "/run/postgresql"
