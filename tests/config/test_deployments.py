"""`fedsender config from-synapse` on the files of whole deployments.

Every setting that touches sending is either in the configuration or named on standard error.
"""

import contextlib
import io
from pathlib import Path

from fedsender.cli import run_command
from fedsender.config import Config, TcpAddress, UnixAddress, loads
from fedsender.config.values import HttpPeer

KEY = "ed25519 a_1 " + 43 * "A" + "\n"
CANARY = "c4n4ry"


def converted(*files: Path, to: Path) -> tuple[Config, list[str]]:
    """The configuration, which passes the check, and what is said on standard error."""
    out, err = io.StringIO(), io.StringIO()
    arguments = [*files, "--secrets", to, "--state", to / "state", "--admin", "127.0.0.1:9009"]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_command(["config", "from-synapse", *map(str, arguments)])
    assert code == 0, err.getvalue()
    assert CANARY not in out.getvalue() + err.getvalue()
    config = to / "config.yaml"
    config.write_text(out.getvalue())
    assert run_command(["config", "check", "-c", str(config)]) == 0
    said = [line.removeprefix("fedsender: ") for line in err.getvalue().splitlines()]
    return loads(out.getvalue(), directory=to), said


def settings_named(said: list[str]) -> list[str]:
    """The settings that these lines are about."""
    return sorted(line.partition(": ")[0] for line in said)


# --- Debian's package -----------------------------------------------------------------------------

DEBIAN = f"""\
pid_file: /var/run/matrix-synapse.pid
listeners:
  - {{port: 8008, type: http, resources: [{{names: [client, federation]}}]}}
  - {{port: 9093, type: http, bind_addresses: [127.0.0.1], resources: [{{names: [replication]}}]}}
database:
  name: psycopg2
  args: {{user: synapse_user, password: {CANARY}1, dbname: synapse, host: localhost, cp_max: 10}}
log_config: /etc/matrix-synapse/log.yaml
media_store_path: /var/lib/matrix-synapse/media
signing_key_path: homeserver.signing.key
trusted_key_servers: [{{server_name: matrix.org}}]
macaroon_secret_key: {CANARY}2
redis:
  enabled: true
  password: ""
instance_map: {{main: {{host: localhost, port: 9093}}}}
worker_replication_secret: {CANARY}3
federation_sender_instances: [fed1]
ip_range_whitelist: []
federation_ip_range_blacklist:
#  - 127.0.0.0/8
"""
DEBIAN_WORKER = """\
worker_app: synapse.app.generic_worker
worker_name: fed1
worker_listeners:
  - {type: metrics, port: 9101, bind_addresses: [127.0.0.1]}
"""


def test_debians_package(tmp_path: Path) -> None:
    """`server_name` is in a directory of its own, which Synapse is given between the two files."""
    etc = tmp_path / "matrix-synapse"
    (etc / "conf.d").mkdir(parents=True)
    (etc / "conf.d" / "server_name.yaml").write_text("server_name: example.org\n")
    (etc / "conf.d" / "report_stats.yaml").write_text("report_stats: false\n")
    (etc / "conf.d" / "README").write_text("Not YAML: [\n")
    (etc / "conf.d" / "old").mkdir()
    (etc / "homeserver.yaml").write_text(DEBIAN)
    (etc / "homeserver.signing.key").write_text(KEY)
    (etc / "fed1.yaml").write_text(DEBIAN_WORKER)

    files = etc / "homeserver.yaml", etc / "conf.d", etc / "fed1.yaml"
    config, said = converted(*files, to=tmp_path / "fedsender")

    assert (config.server_name, config.instance_name) == ("example.org", "fed1")
    assert config.signing_key == etc / "homeserver.signing.key"
    assert config.feed.redis.password_file is None
    assert config.feed.http.instances == {"master": HttpPeer(TcpAddress("localhost", 9093))}
    # Commented out line by line, it is an empty list to Synapse, and not the default.
    assert config.federation.ip_ranges.permit("127.0.0.1")
    assert config.federation.ip_ranges.permit("10.0.0.1")
    assert not config.federation.ip_ranges.permit("0.0.0.0")
    assert not config.federation.ip_ranges.permit("::")
    assert settings_named(said) == ["worker_listeners"]


def test_the_command_may_be_repeated_but_overwrites_no_other_secret(tmp_path: Path) -> None:
    """Whoever has put something right runs it again; a token that is in use stays."""
    (tmp_path / "homeserver.signing.key").write_text(KEY)
    file = tmp_path / "homeserver.yaml"
    file.write_text(DEBIAN + "server_name: example.org\n")
    to = tmp_path / "fedsender"
    converted(file, to=to)
    before = {path.name: path.read_text() for path in to.iterdir() if path.is_file()}
    converted(file, to=to)
    assert {path.name: path.read_text() for path in to.iterdir() if path.is_file()} == before

    file.write_text(file.read_text().replace(f"{CANARY}1", f"{CANARY}4"))
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        assert run_command(["config", "from-synapse", str(file), "--secrets", str(to)]) == 2
    assert f"{to}/database-password: holds something else" in err.getvalue()
    assert CANARY not in err.getvalue()
    assert (to / "database-password").read_text() == before["database-password"]


def test_a_directory_without_settings_is_named(tmp_path: Path) -> None:
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        assert run_command(["config", "from-synapse", str(tmp_path)]) == 2
    assert err.getvalue() == f"fedsender: {tmp_path}: no *.yaml in it\n"


def test_a_database_without_a_password_beside_one_that_has_it_is_named(tmp_path: Path) -> None:
    """Ours would try the one at both; a server that asks for another refuses it."""
    (tmp_path / "homeserver.signing.key").write_text(KEY)
    file = tmp_path / "homeserver.yaml"
    single = DEBIAN[DEBIAN.index("database:") : DEBIAN.index("log_config:")]
    args = "{user: synapse_user, dbname: x, passfile: /etc/pgpass}"
    both = f"""\
server_name: example.org
databases:
  one: {{name: psycopg2, data_stores: [main], args: {{user: u, password: {CANARY}1, dbname: x}}}}
  two: {{name: psycopg2, data_stores: [state], args: {args}}}
"""
    file.write_text(DEBIAN.replace(single, both))
    _, said = converted(file, to=tmp_path / "fedsender")
    assert settings_named(said) == ["databases.two.args.password"]


# --- containers -----------------------------------------------------------------------------------

CONTAINERS = f"""\
server_name: example.org
signing_key: |
  {KEY}
listeners:
  - {{port: 8008, type: http, resources: [{{names: [client, federation]}}]}}
  - {{path: /run/main.sock, type: http, resources: [{{names: [replication]}}]}}
databases:
  one:
    name: psycopg2
    data_stores: [main]
    args:
      {{user: synapse, password: '{CANARY}p@ss:w/rd%', dbname: s, host: pg_main, sslmode: prefer}}
  two:
    name: psycopg2
    data_stores: [state]
    args: {{user: synapse, password: {CANARY}2, dbname: state, host: pg_state}}
redis: {{enabled: true, host: redis_1, dbid: 3, password_path: redis.password}}
instance_map:
  main: {{path: /run/main.sock}}
  persister-0: {{host: persister_0, port: 9093}}
  persister-1: {{host: persister_1, port: 9093}}
  writer: {{host: writer_1, port: 9093}}
  proxy: {{host: proxy_1, port: 9093}}
stream_writers:
  events: [persister-0, persister-1]
  typing: [writer]
  to_device: [writer]
  account_data: [writer]
  receipts: [writer]
  presence: [writer]
  device_lists: [writer, persister-0]
federation_sender_instances: [sender-0, sender-1]
outbound_federation_restricted_to: [proxy]
worker_replication_secret_path: replication.secret
federation_domain_whitelist: [lon.example.com, "*.corp.example"]
federation_metrics_domains: [lon.example.com, "*"]
ip_range_blacklist: [10.0.0.0/8]
ip_range_whitelist: [10.8.0.0/24]
presence: {{enabled: false}}
modules: [{{module: my.presence.Router, config: {{token: {CANARY}3}}}}]
http_proxy: http://u:{CANARY}4@proxy:3128
opentracing: {{enabled: true}}
sentry: {{dsn: "https://{CANARY}5@sentry.example/1"}}
federation: {{max_short_retries: 2, client_timeout: 180s}}
"""
CONTAINER = """\
worker_app: synapse.app.generic_worker
worker_name: sender-0
worker_log_config: /data/log.config
worker_listeners:
  - {type: http, port: 8080, resources: [{names: [health, client]}, {names: [federation]}]}
  - {type: metrics, port: 9000}
"""


def test_containers(tmp_path: Path) -> None:
    """Writers of their own, two databases, sockets, secrets in files, and much that is left out."""
    (tmp_path / "redis.password").write_text(f"{CANARY}6\n")
    (tmp_path / "replication.secret").write_text(f"{CANARY}7\n")
    (tmp_path / "homeserver.yaml").write_text(CONTAINERS)
    (tmp_path / "worker.yaml").write_text(CONTAINER)

    files = tmp_path / "homeserver.yaml", tmp_path / "worker.yaml"
    config, said = converted(*files, to=tmp_path / "fedsender")

    assert config.signing_key.read_text() == KEY
    homeserver, redis, http = config.homeserver, config.feed.redis, config.feed.http
    assert homeserver.database == "postgresql+psycopg://synapse@pg_main/s?sslmode=prefer"
    assert homeserver.state_database == "postgresql+psycopg://synapse@pg_state/state"
    assert config.sender_database == "postgresql+psycopg://synapse@pg_main/fedsender?sslmode=prefer"
    assert homeserver.event_writers == ("persister-0", "persister-1")
    assert config.allow == ("lon.example.com",)
    assert not homeserver.presence.enabled
    assert (str(redis.address), redis.password_file) == (
        "redis_1:6379",
        tmp_path / "redis.password",
    )
    assert http.instances == {
        "master": HttpPeer(UnixAddress(Path("/run/main.sock"))),
        "writer": HttpPeer(TcpAddress("writer_1", 9093)),
    }
    assert http.secret_file == tmp_path / "replication.secret"
    assert config.destinations.defaults.request_timeout == 180
    assert config.federation.ip_ranges.permit("10.8.0.1")
    assert not config.federation.ip_ranges.permit("10.9.0.1")
    assert settings_named(said) == [
        "federation.max_short_retries",
        "federation_domain_whitelist",
        "federation_metrics_domains",
        "http_proxy",
        "modules",
        "opentracing",
        "outbound_federation_restricted_to",
        "sender_database",
        "sentry",
        "worker_listeners",
        "worker_listeners",
        "worker_log_config",
    ]
    assert any("'*.corp.example'" in line for line in said)
    assert any("serve client, federation, which a sender of ours does not" in line for line in said)
