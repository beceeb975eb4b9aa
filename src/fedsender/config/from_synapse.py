"""A configuration of ours from Synapse's files: `fedsender config from-synapse`.

The printed configuration is checked as any other. Settings that could not be carried over are
named, one by one. No secret's value is printed: the configuration names a file for each, which is
Synapse's own where it has one.
"""

import ipaddress
import os
import secrets as random
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import yaml
from sqlalchemy import make_url

from fedsender.config import ConfigError, loads, read_secret
from fedsender.config.synapse import (
    Roles,
    Settings,
    SynapseDatabase,
    clamped,
    databases_of,
    destinations_of,
    federation_of,
    in_seconds,
    read_synapse,
    redis_address,
    restriction_of,
    roles_of,
)
from fedsender.config.values import TcpAddress, parse_no_proxy, parse_proxy, proxy_url
from fedsender.matrix import ROOM_VERSIONS, is_server_name

MAX_PER_DESTINATION: Final = 100
# Where a URL has no port.
_PROXY_PORT: Final = 1080

_NOTHING_LIKE_IT: Final = {
    "http_proxy": "other servers are reached by https_proxy",
    "worker_log_config": "the log goes to standard error: see log",
    "worker_listeners": "metrics and health are at admin.listen",
    "federation_rr_transactions_per_room_per_second": "50 servers a second are told of receipts",
    "modules": "what a module does in a sender, such as to route presence, is not done",
    "sentry": "errors are in the log",
    "use_insecure_ssl_client_just_for_testing_do_not_use": "see federation.verify_certificates",
}
# What a worker's listeners may serve and we do not; health and metrics are ours too.
_NOT_SERVED: Final = frozenset(
    ("client", "consent", "federation", "keys", "media", "openid", "static")
)
_EXPERIMENTAL_ROOMS = {
    "msc1767_enabled": "org.matrix.msc1767.10",
    "msc4242_enabled": "org.matrix.msc4242.12",
}
_RETRY_WITHIN_A_REQUEST: Final = (
    "max_long_retries",
    "max_long_retry_delay",
    "max_short_retries",
    "max_short_retry_delay",
)


@dataclass(frozen=True, slots=True)
class Secret:
    """A secret that stands in Synapse's file itself, or is ours.

    Attributes:
        file: the file that the configuration names for it.
        ours: it is not Synapse's; any other would do as well.
    """

    setting: str
    file: str
    value: str = field(repr=False)
    ours: bool = False


@dataclass(slots=True)
class Converted:
    """The configuration as YAML, and the notes about it.

    Attributes:
        notes: settings that could not be carried over, and steps that must be done, one line each.
        secrets: those with files that the operator has to write.
    """

    text: str = ""
    notes: list[str] = field(default_factory=list)
    secrets: list[Secret] = field(default_factory=list)


def from_synapse(
    files: Sequence[Path],
    *,
    instance: str | None = None,
    secrets: Path | None = None,
    state: Path | None = None,
    admin: str | None = None,
) -> Converted:
    """The settings of these files, as a configuration of ours.

    Args:
        files: Synapse's, or directories of them, in the order in which Synapse is given them.
        instance: the federation sender to be, one of several that share a database; None: the one
        that the files name.
        secrets: the directory for files with secrets; None: that of the configuration.
        state: the directory of all that the daemon writes; None: that of the configuration.
        admin: where the admin endpoint listens, with a token of its own; None: the default, which
        without a token has only health and metrics.

    Raises:
        ConfigError: one of them cannot be used, or it is not a Synapse that we can send for.
    """
    settings = read_synapse(files)
    made = _Making(settings, Converted(), secrets)
    roles = roles_of(settings, instance, made.done.notes)
    values = made.values(roles, several=instance is not None or len(roles.senders) > 1)
    values = values if state is None else _kept_in(state.absolute()) | values
    if admin is not None:
        new = random.token_urlsafe(32)
        token = made.secret("admin.token_file", "admin.token", new, ours=True)
        values["admin"] = {"listen": admin, "token_file": token}
    heading = "# Made from Synapse's configuration by `fedsender config from-synapse`.\n"
    if (step := restriction_of(settings, roles.instance)) is not None:
        made.done.notes.append(step)
        heading += textwrap.indent(textwrap.fill(f"{step}.", 98), "# ") + "\n"
    made.done.text = heading + yaml.safe_dump(values, sort_keys=False, width=100)
    # In its own words what is still wrong: it should not be, whatever the files hold.
    loads(made.done.text, directory=Path("/"), file="the configuration made of them")
    made.say_what_is_left_out()
    return made.done


def write_secrets(secrets: Sequence[Secret]) -> None:
    """Write each secret into its file, for its owner alone. Raises ConfigError.

    A file that holds the same already, or a token of ours, stays: the command may be repeated.
    """
    for secret in secrets:
        path = Path(secret.file)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            if secret.ours or read_secret(path) == secret.value:
                continue
            raise ConfigError(f"{path}: holds something else, and is not overwritten") from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
        with os.fdopen(opened, "w") as file:
            file.write(secret.value + "\n")


def _kept_in(state: Path) -> dict[str, Any]:
    """The files that the daemon writes, below one directory: the only one that its unit lets it
    write to."""
    return {
        "sender_database": str(state / "fedsender.sqlite3"),
        "ledger": {"directory": str(state / "ledger")},
        "pipeline": {"lake": str(state / "lake")},
    }


@dataclass(slots=True)
class _Making:
    settings: Settings
    done: Converted
    directory: Path | None

    def note(self, setting: str, text: str) -> None:
        self.done.notes.append(f"{setting}: {text}")

    def secret(self, setting: str, file: str, value: str, *, ours: bool = False) -> str:
        """The file to name for a secret that stands in Synapse's own file."""
        path = file if self.directory is None else str(self.directory.absolute() / file)
        self.done.secrets.append(Secret(setting, path, value, ours))
        return path

    def secret_or_path(self, settings: Settings, name: str, path: str, file: str) -> str | None:
        """Of a secret that Synapse takes from its settings or from a file: the file to name."""
        # Templates write "" for what there is none of.
        value = None if settings.values.get(name) == "" else settings.text(name)
        in_file = settings.values.get(path) not in (None, "")
        if value is not None and in_file:
            raise settings.wrong(name, f"stands beside {path}: only one of them can be used")
        if value is not None:
            return self.secret(settings.name_of(name), file, value)
        return settings.path(path) if in_file else None

    def values(self, roles: Roles, *, several: bool) -> dict[str, Any]:
        """The whole configuration; `several`: of one of several senders."""
        settings = self.settings
        server_name = settings.text("server_name")
        if server_name is None or not is_server_name(server_name):
            raise settings.wrong("server_name", "must be set, to a server name")
        path = settings.path("signing_key_path")
        if "signing_key" in settings:
            key = settings.line("signing_key") or ""
            path = self.secret("signing_key", "signing.key", key)
        if path is None:
            path = str(settings.source("server_name").absolute().parent / server_name)
            path += ".signing.key"
        values: dict[str, Any] = {
            "server_name": server_name,
            "instance_name": roles.instance,
            "signing_key": path,
            "homeserver": (homeserver := self.homeserver(roles)),
            **(self.shared(homeserver) if several else {}),
            "feed": {"kind": "redis", "redis": self.redis()} | self.http(roles),
            "federation": federation_of(settings, self.note) | self.proxy(),
            "destinations": destinations_of(settings, self.note),
            "metrics": self.metrics(),
        }
        given = {name: value for name, value in values.items() if value not in ({}, [], None)}
        return given | self.allowed()

    def allowed(self) -> dict[str, list[str]]:
        """The setting `allow`, where Synapse has a list; an empty one allows no server."""
        listed = self.settings.texts("federation_domain_whitelist")
        if listed is None:
            return {}
        names = [name for name in listed if is_server_name(name)]
        if len(names) < len(listed):
            self.note("federation_domain_whitelist", _no_names(listed))
        return {"allow": names}

    # --- the homeserver ---------------------------------------------------------------------------

    def homeserver(self, roles: Roles) -> dict[str, Any]:
        settings = self.settings
        main, state = databases_of(settings)
        if state is not None and state.password is None and main.password is not None:
            self.note(state.setting, "is not set: the other database's password is tried there")
        values: dict[str, Any] = {
            "kind": "synapse",
            **self.database("database", main),
            **(self.database("state_database", state) if state is not None else {}),
            "event_writers": list(roles.event_writers),
            "federation_sender_instances": list(roles.senders),
        }
        presence = self.presence()
        if presence:
            values["presence"] = presence
        if settings.flag("allow_device_name_lookup_over_federation", False):
            values["device_names"] = True
        return values

    def database(self, name: str, database: SynapseDatabase) -> dict[str, str]:
        values = {name: database.url}
        if database.password is not None:
            file = f"{name.replace('_', '-')}-password"
            path = self.secret(database.setting, file, database.password)
            values[f"{name}_password_file"] = path
        for setting in database.left_out:
            self.note(setting, "is left out")
        return values

    def shared(self, homeserver: dict[str, Any]) -> dict[str, Any]:
        """The database that several senders share: beside Synapse's own, on the same server."""
        if not homeserver["database"].startswith("postgresql"):
            raise self.settings.wrong("database", "must be a PostgreSQL for several senders")
        url = make_url(homeserver["database"]).difference_update_query(["dbname"])
        url = url.set(database="fedsender")
        self.note("sender_database", "all senders share it: make the database fedsender there")
        password = homeserver.get("database_password_file")
        return {
            "sender_database": url.render_as_string(),
            "sender_database_password_file": password,
        }

    def presence(self) -> dict[str, Any]:
        section = self.settings.section("presence")
        values: dict[str, Any] = {}
        # "untracked" leaves it to modules, whose word is sent all the same.
        enabled = section.values.get("enabled") == "untracked" or section.flag(
            "enabled", self.settings.flag("use_presence", True)
        )
        if not enabled:
            values["enabled"] = False
        seconds = section.seconds("last_active_granularity")
        if seconds is not None:
            values["last_active_granularity"] = in_seconds(max(1.0, clamped(seconds)))
        rooms = self.settings.texts("exclude_rooms_from_presence")
        if rooms:
            values["excluded_rooms"] = list(rooms)
        if "presence_router" in section:
            self.note("presence.presence_router", "what a module routes cannot be known here")
        return values

    # --- the feed ---------------------------------------------------------------------------------

    def redis(self) -> dict[str, Any]:
        redis = self.settings.section("redis")
        if not redis.flag("enabled", False):
            must = "must be true: it is how Synapse tells other processes what is new"
            raise redis.wrong("enabled", must)
        values: dict[str, Any] = {"address": redis_address(redis)}
        username = redis.text("username")
        password = self.secret_or_path(redis, "password", "password_path", "redis-password")
        if password is not None:
            values["password_file"] = password
        if username is not None:
            if password is None:
                raise redis.wrong("username", "needs a password")
            values["username"] = username
        values |= self.redis_tls(redis, over_unix="path" in redis)
        return values

    def redis_tls(self, redis: Settings, *, over_unix: bool) -> dict[str, Any]:
        if not redis.flag("use_tls", False):
            return {}
        if over_unix:
            self.note("redis.use_tls", "is left out: TLS is not spoken on a Unix socket")
            return {}
        ours = {
            "ca_file": "ca_file",
            "ca_path": "ca_directory",
            "certificate_file": "certificate_file",
            "private_key_file": "private_key_file",
        }
        found = {name: redis.path(theirs) for theirs, name in ours.items()}
        if found["private_key_file"] is not None and found["certificate_file"] is None:
            raise redis.wrong("private_key_file", "needs a certificate_file")
        self.note(
            "redis.use_tls",
            "the certificate is checked, which Synapse does not do; if it is not of a trusted"
            " authority, name that in feed.redis.ca_file, or set verify_certificate: false",
        )
        return {"tls": True} | {name: path for name, path in found.items() if path is not None}

    def http(self, roles: Roles) -> dict[str, Any]:
        if not roles.peers:
            return {}
        values: dict[str, Any] = {"instances": dict(roles.peers)}
        names = ("worker_replication_secret", "worker_replication_secret_path")
        secret = self.secret_or_path(self.settings, *names, "worker-replication-secret")
        if secret is not None:
            values["secret_file"] = secret
        return {"http": values}

    # --- the proxy --------------------------------------------------------------------------------

    def proxy(self) -> dict[str, Any]:
        settings = self.settings
        # "" is none, too.
        text = settings.text("https_proxy") if settings.values.get("https_proxy") else None
        if text is None:
            if settings.values.get("no_proxy_hosts"):
                self.note("no_proxy_hosts", "is left out: there is no https_proxy")
            return {}
        spared = self.no_proxy()
        if spared is None:
            self.note("https_proxy", "is left out: no_proxy_hosts has *, which is all servers")
            return {}
        must = "must be a URL such as http://proxy.example:3128"
        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            address = TcpAddress(parts.hostname or "", parts.port or _PROXY_PORT)
            url = proxy_url(parse_proxy(f"{parts.scheme}://{address}"))
        except ValueError:
            raise settings.wrong("https_proxy", must) from None
        values: dict[str, Any] = {"url": url}
        if parts.username and parts.password:
            password = unquote(parts.password)
            values["username"] = unquote(parts.username)
            values["password_file"] = self.secret("https_proxy", "proxy-password", password)
        elif parts.username or parts.password:
            self.note("https_proxy", "its user is left out: there must be a name and a password")
        if spared:
            values["no_proxy"] = spared
        self.note(
            "https_proxy",
            "federation.ip_deny is judged here, too, which Synapse leaves to its proxy",
        )
        return {"proxy": values}

    def no_proxy(self) -> list[str] | None:
        """Our `no_proxy`; None: no server is reached through the proxy."""
        found: list[str] = []
        listed = self.settings.texts("no_proxy_hosts") or ()
        if "*" in listed:
            return None
        wrong = 0
        for each in listed:
            try:
                found.append(str(ipaddress.ip_network(each, strict=False)))
                continue
            except ValueError:
                pass
            try:
                name = parse_no_proxy(each.lstrip("."))
            except ValueError:
                wrong += 1
                continue
            # There a name is also all names below it.
            found += [str(name), f".{name}"]
        if wrong:
            self.note("no_proxy_hosts", f"{wrong} of it left out: no names, IPs or ranges")
        return found

    # --- the rest ---------------------------------------------------------------------------------

    def metrics(self) -> dict[str, Any]:
        domains = self.settings.texts("federation_metrics_domains") or ()
        names = [name for name in domains if is_server_name(name)]
        if len(names) < len(domains):
            self.note("federation_metrics_domains", _no_names(domains))
        if len(names) > MAX_PER_DESTINATION:
            self.note("federation_metrics_domains", f"only the first {MAX_PER_DESTINATION}")
        return {"per_destination": names[:MAX_PER_DESTINATION]} if names else {}

    # --- what is left out -------------------------------------------------------------------------

    def say_what_is_left_out(self) -> None:
        """Note the settings without a counterpart here, and the files that are not written yet."""
        settings = self.settings
        for name, text in _NOTHING_LIKE_IT.items():
            if settings.values.get(name):
                self.note(name, f"is left out: {text}")
        if served := sorted(_NOT_SERVED & _served(settings)):
            self.note(
                "worker_listeners",
                f"serve {', '.join(served)}, which a sender of ours does not: see that nobody asks"
                " there any more before you stop the worker",
            )
        if settings.section("opentracing").values.get("enabled") is True:
            self.note("opentracing", "is left out: nothing is traced")
        self._say_which_rooms_cannot_be_served()
        federation = settings.section("federation")
        for name in _RETRY_WITHIN_A_REQUEST:
            if name in federation:
                text = "is left out: every attempt is followed by destinations.defaults.backoff"
                self.note(federation.name_of(name), text)
        for secret in self.done.secrets:
            if self.directory is None:
                self.note(
                    secret.setting,
                    f"is a secret: write it into the file {secret.file} beside the configuration,"
                    " for its user alone (or use --secrets DIR)",
                )

    def _say_which_rooms_cannot_be_served(self) -> None:
        text = "fedsender does not know: events of its rooms go to quarantine, and to no server"
        default = self.settings.values.get("default_room_version")
        if default is not None and str(default) not in ROOM_VERSIONS:
            self.note("default_room_version", f"is {default}, a room version that {text}")
        experiments = self.settings.section("experimental_features")
        for name, version in _EXPERIMENTAL_ROOMS.items():
            if experiments.values.get(name) is True:
                text_of_it = f"allows rooms of version {version}, which {text}"
                self.note(experiments.name_of(name), text_of_it)


def _no_names(texts: Sequence[str]) -> str:
    """Those of these that are no server names."""
    found = [repr(text[:100]) for text in texts if not is_server_name(text)]
    return f"left out, no server names: {', '.join(found[:10])}{' ...' if found[10:] else ''}"


def _served(settings: Settings) -> set[str]:
    """The resources of the worker's own listeners, as far as they are as Synapse wants them."""
    found: set[str] = set()
    for listener in _dicts(settings.values.get("worker_listeners")):
        for resource in _dicts(listener.get("resources")):
            names = resource.get("names")
            found.update(map(str, names if isinstance(names, list) else [names]))
    return found


def _dicts(value: object) -> list[dict[Any, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
