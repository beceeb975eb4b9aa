"""Synapse's configuration: its YAML files as Synapse reads them, and the settings that concern us.

Later files replace whole top-level settings of earlier ones, as several `-c` of Synapse do, and a
directory stands for all `*.yaml` in it, in the order of their names. Errors name the file, the
setting and the values that it may have, but never its value: secrets stand there.

`roles_of` finds which process does which work; `federation_of` and `destinations_of` give our
sections of the same settings; `databases_of` gives the URLs of the databases, without a password.
"""

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psycopg
import yaml
from psycopg import conninfo, pq
from sqlalchemy import URL

from fedsender.config.document import ConfigError, cannot_be_read
from fedsender.config.policy import Backoff
from fedsender.config.values import is_pattern, parse_http_peer

MAX_BYTES: Final = 4 * 1024 * 1024
MAX_ITEMS: Final = 10_000
"""As many overrides as there may be."""
# What PyYAML's constructors raise for scalars that are not what their tag or form says.
_NOT_YAML: Final = (
    yaml.YAMLError,
    ValueError,
    LookupError,
    AttributeError,
    TypeError,
    ArithmeticError,
    RecursionError,
)
_MS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800, "y": 365 * 86_400}
_DURATION: Final = re.compile(r"([0-9]{1,15})([smhdwy]?)")


@dataclass(frozen=True, slots=True)
class Settings:
    """Some settings of Synapse, and where each top-level one stands.

    Attributes:
        at: where these are, below the top: `redis`, `databases.main.args`, or nothing.
        sources: the file of each top-level setting, or of all of these.
    """

    values: Mapping[str, Any]
    sources: Mapping[str, Path]
    at: str = ""
    file: Path = field(default_factory=Path)

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def source(self, name: str) -> Path:
        """The file that sets `name`."""
        return self.file if self.at else self.sources.get(name, self.file)

    def name_of(self, name: str) -> str:
        """The whole name of a setting here, as an operator would write it."""
        return f"{self.at}.{name}" if self.at else name

    def wrong(self, name: str, must: str) -> ConfigError:
        """The error for a setting: `must` is the rule for its value."""
        return ConfigError(f"{self.source(name)}: {self.name_of(name)}: {must}")

    def section(self, name: str) -> "Settings":
        """The settings below `name`; none of them where it is not set."""
        value = self.values.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise self.wrong(name, "must hold settings, one per line")
        return Settings(value, {}, self.name_of(name), self.source(name))

    def text(self, name: str) -> str | None:
        """A text; a number counts as one. None where it is not set."""
        value = self.values.get(name)
        return None if value is None else self._text(name, value)

    def line(self, name: str) -> str | None:
        """A text; the line break that YAML's block style leaves at its end is no part of it."""
        value = self.values.get(name)
        return self._text(name, value.rstrip("\r\n")) if isinstance(value, str) else self.text(name)

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "must be true or false")
        return value

    def integer(self, name: str, default: int, *, least: int, most: int) -> int:
        """A whole number between two bounds."""
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(name, f"must be a whole number from {least} to {most}")
        return value

    def number(self, name: str) -> float | None:
        """A number, or None where it is not set."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e15:
            raise self.wrong(name, "must be a number")
        return float(value)

    def seconds(self, name: str) -> float | None:
        """A duration in seconds, from Synapse's `10m` or its milliseconds; None: not set."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        match = _DURATION.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise self.wrong(name, "must be a duration such as 30s, 10m or 7d")
        return int(match[1]) * (_MS[match[2]] if match[2] else 0.001)

    def texts(self, name: str) -> tuple[str, ...] | None:
        """A list of texts; one alone, and the keys of a mapping, count as one. None: not set."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list | dict) or len(value) > MAX_ITEMS:
            raise self.wrong(name, "must be a list")
        return tuple(self._text(name, item) for item in value)

    def path(self, name: str) -> str | None:
        """The path of a file, made absolute; None where it is not set."""
        text = self.text(name)
        return None if text is None else absolute(text, self.source(name))

    def paths(self, name: str) -> tuple[str, ...]:
        """The paths of files, made absolute."""
        return tuple(absolute(text, self.source(name)) for text in self.texts(name) or ())

    def _text(self, name: str, value: object) -> str:
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str) or not value or not is_plain(value):
            raise self.wrong(name, "must be text")
        return value


def is_plain(text: str) -> bool:
    """Whether there is nothing in it that no file could hold, and no control character."""
    return all(char >= " " and char != "\x7f" and not "\ud800" <= char <= "\udfff" for char in text)


def absolute(path: str, file: Path) -> str:
    """A path of `file`, absolute: a relative one is taken from the file's own directory."""
    return str(file.absolute().parent / path)


def read_synapse(paths: Sequence[Path]) -> Settings:
    """The settings of these files and directories together. Raises ConfigError."""
    values: dict[str, Any] = {}
    files = [file for path in paths for file in _files(path)]
    if not files:
        raise ConfigError(f"{paths[0]}: no *.yaml in it")
    sources: dict[str, Path] = {}
    workers: dict[object, Path] = {}
    for file in files:
        found = _read(file)
        if "worker_name" in found:
            workers.setdefault(str(found["worker_name"]), file)
        values |= found
        sources |= dict.fromkeys(found, file)
    if len(workers) > 1:
        names = " and ".join(str(file) for file in workers.values())
        raise ConfigError(f"{names} are of different workers: give the file of one")
    return Settings(values, sources, file=files[0])


def _files(path: Path) -> list[Path]:
    try:
        if not path.is_dir():
            return [path]
        return sorted(file for file in path.iterdir() if file.suffix == ".yaml" and file.is_file())
    except OSError as error:
        raise cannot_be_read(path, error) from None


def _read(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            raw = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise cannot_be_read(file, error) from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{file}: larger than {MAX_BYTES} bytes")
    try:
        values = yaml.load(raw, Loader=_Loader)
    except _NOT_YAML as error:
        raise ConfigError(f"{file}: {_place(error)}not YAML") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{file}: must be a mapping of settings")
    return values


def _place(error: Exception) -> str:
    """The place of the error. PyYAML's own text may quote the file, and is left out."""
    mark = (
        error.problem_mark or error.context_mark
        if isinstance(error, yaml.MarkedYAMLError)
        else None
    )
    return f"line {mark.line + 1}: " if mark else ""


# libyaml's, where it is there: ten times as fast.
_Loader: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


MAIN: Final = "master"
"""The main process by its name on the wire; in `instance_map` it is `main`."""
OURS: Final = "fedsender"
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_RESTRICTED: Final = "outbound_federation_restricted_to"
_ONE_PROCESS: Final = (
    "run_background_tasks_on",
    "update_user_directory_from_worker",
    "notify_appservices_from_worker",
    "media_instance_running_background_jobs",
)


@dataclass(frozen=True, slots=True)
class Roles:
    """Which of Synapse's processes sends, writes events and answers over HTTP.

    Attributes:
        instance: the sender that we replace.
        senders: all federation senders, in Synapse's order.
        event_writers: the processes that write events.
        peers: the addresses of the processes with rows that are in no database, by their names on
        the wire.
    """

    instance: str
    senders: tuple[str, ...]
    event_writers: tuple[str, ...]
    peers: Mapping[str, str]


def roles_of(settings: Settings, wanted: str | None, notes: list[str]) -> Roles:
    """Raises ConfigError. Steps for the operator are added to `notes`."""
    senders = _names(settings, "federation_sender_instances")
    instance = _instance(settings, senders, wanted)
    if senders is None or senders == (MAIN,):
        senders = (instance,)
        if settings.flag("send_federation", True):
            notes.append(_step_of_the_main_process(settings, instance))
    _refuse_other_duties(settings, instance)
    writers = settings.section("stream_writers")
    event_writers = _names(writers, "events") or (MAIN,)
    return Roles(instance, senders, event_writers, _peers(settings, writers, notes))


def _step_of_the_main_process(settings: Settings, instance: str) -> str:
    """What the operator of a Synapse does whose main process sends.

    Raises ConfigError where it has no Redis or no PostgreSQL, without which we know of nothing.
    """
    there = {
        "PostgreSQL": databases_of(settings)[0].url.startswith("postgresql"),
        "Redis": settings.section("redis").flag("enabled", False),
        "instance_map": "main" in settings.section("instance_map"),
        "federation_sender_instances": False,
    }
    if there["PostgreSQL"] and there["Redis"]:
        return (
            "federation_sender_instances: Synapse's main process sends itself; before the"
            " first start set `send_federation: false` and"
            f" `federation_sender_instances: [{instance}]` there, and restart it:"
            " docs/switching-single.md"
        )
    missing = ", ".join(name for name, is_there in there.items() if not is_there)
    raise ConfigError(
        f"{settings.file}: Synapse's main process sends itself, and a sender of its own needs what"
        f" is missing here: {missing}; docs/switching-single.md has the steps"
    )


def _names(settings: Settings, name: str) -> tuple[str, ...] | None:
    names = settings.texts(name)
    if names is None:
        return None
    for each in names:
        _check(settings, name, each)
    if len(set(names)) < len(names):
        raise settings.wrong(name, "names one instance twice")
    return names


def _check(settings: Settings, name: str, instance: str) -> str:
    if not _NAME.fullmatch(instance):
        raise settings.wrong(name, "must be a name of letters, digits, dots, - and _")
    return instance


def _instance(settings: Settings, senders: tuple[str, ...] | None, wanted: str | None) -> str:
    worker = settings.text("worker_name")
    if worker is not None:
        _check(settings, "worker_name", worker)
    chosen = wanted or worker
    if chosen is None and senders is not None:
        others = [name for name in senders if name != MAIN]
        if len(others) > 1:
            raise settings.wrong(
                "federation_sender_instances",
                "names several workers: give the file of one, or --instance NAME",
            )
        chosen = others[0] if others else None
    chosen = _check(settings, "worker_name", chosen or OURS)
    if chosen == MAIN:
        raise settings.wrong("worker_name", "must not be that of the main process")
    if not wanted and senders and senders != (MAIN,) and chosen not in senders:
        raise settings.wrong("federation_sender_instances", f"does not name {chosen}")
    return chosen


def _refuse_other_duties(settings: Settings, instance: str) -> None:
    """Raise ConfigError where the process that we replace does work that we do not."""
    writers = settings.section("stream_writers")
    for name in writers.values:
        if instance in (writers.texts(name) or ()):
            raise writers.wrong(name, f"names {instance}, which only sends: give it to another")
    for name in _ONE_PROCESS:
        if settings.values.get(name) == instance:
            raise settings.wrong(name, f"names {instance}, which only sends: give it to another")
    if instance in (settings.texts("pusher_instances") or ()):
        must = f"names {instance}, which only sends: give it to another"
        raise settings.wrong("pusher_instances", must)


def restriction_of(settings: Settings, instance: str) -> str | None:
    """What `outbound_federation_restricted_to` means for the operator, once we are `instance`.

    None where it is not set. Raises ConfigError.
    """
    named = settings.texts(_RESTRICTED)
    if named is None:
        return None
    if instance not in named:
        instances = settings.section("instance_map")
        places = [
            f"{name} ({_address(instances.section(name))})" if name in instances else name
            for name in named
        ]
        return (
            f"{_RESTRICTED}: Synapse sends to other servers only through {', '.join(places)};"
            " fedsender would pass it by, and connect to them itself. If it is a Secure Border"
            " Gateway, or the only way out that is permitted, do not let fedsender send"
        )
    return (
        f"{_RESTRICTED}: Synapse's other processes send their joins, key queries, media requests"
        f" and backfill to other servers through the worker {instance}, and fedsender does not pass"
        f" them on. Before you stop {instance}, name a Synapse worker there that is no federation"
        ' sender, or remove the setting: docs/switching.md, "Other requests of Synapse"'
    )


def _peers(settings: Settings, writers: Settings, notes: list[str]) -> dict[str, str]:
    """The addresses of the processes with typing, presence and the stream called `federation`."""
    instances = settings.section("instance_map")
    asked = {MAIN, *(_names(writers, "typing") or ()), *(_names(writers, "presence") or ())}
    peers: dict[str, str] = {}
    for name in sorted(asked):
        key = "main" if name == MAIN and "main" in instances else name
        if key in instances:
            peers[name] = _address(instances.section(key))
        else:
            notes.append(
                f"instance_map: has no {'main' if name == MAIN else name}: what it says while we"
                " are away (typing, presence) cannot be asked for"
            )
    return peers


def _address(entry: Settings) -> str:
    path = entry.path("path")
    if path is not None:
        return _checked(entry, "path", f"unix:{path}")
    host = entry.text("host")
    if host is None or "port" not in entry:
        raise entry.wrong("host", "must be set, and port, or else path")
    port = entry.integer("port", 0, least=1, most=65_535)
    return _checked(entry, "host", _joined(host, port, tls=entry.flag("tls", False)))


def redis_address(redis: Settings) -> str:
    """Where that section's Redis server listens. Raises ConfigError."""
    path = redis.path("path")
    if path is not None:
        return _checked(redis, "path", f"unix:{path}")
    host = redis.text("host") or "localhost"
    port = redis.integer("port", 6379, least=1, most=65_535)
    return _checked(redis, "host", _joined(host, port, tls=False))


def _joined(host: str, port: int, *, tls: bool) -> str:
    bare = host.strip("[]")
    return f"{'https://' if tls else ''}{f'[{bare}]' if ':' in bare else bare}:{port}"


def _checked(settings: Settings, name: str, address: str) -> str:
    try:
        parse_http_peer(address)
    except ValueError:
        raise settings.wrong(name, "is not an address that can be connected to") from None
    return address


HEALTHY_S: Final = 3600.0
LATELY_S: Final = 6 * 3600.0

Note = Callable[[str, str], None]
"""Notes the fate of a setting."""


def federation_of(settings: Settings, note: Note) -> dict[str, Any]:
    """The section `federation`. Raises ConfigError."""
    values: dict[str, Any] = {}
    if not settings.flag("federation_verify_certificates", True):
        values["verify_certificates"] = False
    authorities = settings.paths("federation_custom_ca_list")
    if authorities and values:
        note("federation_custom_ca_list", "has no use with certificates unchecked")
    elif authorities:
        values["ca_file"] = authorities[0]
        if authorities[1:]:
            values["more_ca_files"] = list(authorities[1:])
    oldest = settings.text("federation_client_minimum_tls_version")
    if oldest in ("1.3", "1.2"):
        values["minimum_tls_version"] = oldest
    elif oldest is not None:
        note("federation_client_minimum_tls_version", "1.2 is the oldest that is spoken")
    values |= _ip_ranges(settings)
    suffix = settings.text("user_agent_suffix")
    if suffix is not None:
        suffix = suffix.strip()
        if suffix.isascii() and is_plain(suffix) and 0 < len(suffix) <= 200:
            values["user_agent_suffix"] = suffix
        else:
            note("user_agent_suffix", "is left out: up to 200 ASCII characters can be")
    return values


def destinations_of(settings: Settings, note: Note) -> dict[str, Any]:
    """The section `destinations`. Raises ConfigError."""
    values: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    timeout = settings.section("federation").seconds("client_timeout")
    if timeout is not None:
        defaults["request_timeout"] = in_seconds(max(1.0, clamped(timeout)))
    backoff = _backoff(settings, note)
    if backoff:
        defaults["backoff"] = backoff
    if defaults:
        values["defaults"] = defaults
    if not settings.flag("federation_verify_certificates", True):
        return values
    names = settings.texts("federation_certificate_verification_whitelist") or ()
    patterns = [name for name in names if is_pattern(name)]
    if patterns:
        values["overrides"] = [
            {"match": pattern, "verify_certificates": False} for pattern in patterns
        ]
        if len(patterns) < len(names):
            note(
                "federation_certificate_verification_whitelist",
                "only what can be a server's name",
            )
        note(
            "federation_certificate_verification_whitelist",
            "compared with a server's name, not with that of the host that it delegates to",
        )
    return values


def _ip_ranges(settings: Settings) -> dict[str, list[str]]:
    # A list of which every line is commented out is no list, and is not the default either.
    if "federation_ip_range_blacklist" in settings.values:
        # Where it is set, Synapse asks neither of the other two about federation.
        return {"ip_deny": _networks(settings, "federation_ip_range_blacklist")}
    values: dict[str, list[str]] = {}
    if "ip_range_blacklist" in settings.values:
        values["ip_deny"] = _networks(settings, "ip_range_blacklist")
    if allowed := _networks(settings, "ip_range_whitelist"):
        values["ip_allow"] = allowed
    return values


def _backoff(settings: Settings, note: Note) -> dict[str, float | str]:
    """Synapse's waits between attempts, where they are set and bounds of ours allow."""
    section = settings.section("federation")
    first = section.seconds("destination_min_retry_interval")
    longest = section.seconds("destination_max_retry_interval")
    values: dict[str, float] = {}
    if first is not None:
        values["first"] = max(1.0, clamped(first))
    if longest is not None:
        last = max(1.0, clamped(longest))
        least = values.get("first", 0.0)
        values["ceiling_healthy"] = max(least, min(last, HEALTHY_S))
        values["ceiling"] = max(values["ceiling_healthy"], min(last, LATELY_S))
    elif first is not None:
        values["ceiling_healthy"] = max(first, HEALTHY_S)
        values["ceiling"] = max(first, LATELY_S)
    if values and any(Backoff.model_validate(values).contradictions()):
        note(
            "federation.destination_*retry*",
            "left out: a server that never answers would be tried more than 60 times a day",
        )
        return {}
    if values:
        note(
            "federation.destination_*retry*",
            "is carried over, but for the multiplier, which is 2; without it"
            " (destinations.defaults.backoff) a server that was well is tried again after seconds",
        )
    return {name: in_seconds(value) for name, value in values.items()}


def clamped(seconds: float) -> float:
    """A duration that a setting of ours can hold."""
    return min(seconds, 10 * 365 * 86_400.0)


def in_seconds(seconds: float) -> str:
    """A duration as a setting of ours is written."""
    return f"{seconds:.6f}".rstrip("0").rstrip(".") + "s"


def _networks(settings: Settings, name: str) -> list[str]:
    texts = settings.texts(name) or ()
    try:
        return [str(ipaddress.ip_network(text, strict=False)) for text in texts]
    except ValueError:
        raise settings.wrong(name, "must be a list of IPs and IP ranges") from None


# Of `args`, what belongs to Synapse's own pool and driver.
_NOT_LIBPQ: Final = ("cp_", "async", "connection_factory", "cursor_factory", "check_same_thread")
_OURS: Final = ("application_name", "fallback_application_name", "client_encoding")
_FILES: Final = ("sslcert", "sslkey", "sslrootcert", "sslcrl", "sslcrldir", "passfile")
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")
_SECRET_WORDS: Final = ("password", "secret", "scram", "key_log")


@dataclass(frozen=True, slots=True)
class SynapseDatabase:
    """One of Synapse's databases.

    Attributes:
        url: without a password.
        setting: where the password stands, for an operator.
        left_out: settings that could not be carried over.
    """

    url: str
    setting: str
    password: str | None
    left_out: tuple[str, ...] = ()


def databases_of(settings: Settings) -> tuple[SynapseDatabase, SynapseDatabase | None]:
    """The main database and, where it is apart, that of the state groups. Raises ConfigError."""
    several, one = "databases" in settings, "database" in settings
    if several and one:
        raise settings.wrong("databases", "stands beside database: only one of them can be used")
    if not several:
        if not one and "database_path" in settings:
            return _sqlite(settings, "database_path"), None
        if not one:
            raise settings.wrong("database", "must be set")
        return _database(settings.section("database")), None
    found: dict[str, Settings] = {}
    databases = settings.section("databases")
    for section in map(databases.section, databases.values):
        for store in section.texts("data_stores") or ("main", "state"):
            if store in found:
                raise section.wrong("data_stores", "names a store that another database has")
            found[store] = section
    if "main" not in found or "state" not in found:
        raise settings.wrong("databases", "must have the data_stores main and state")
    main, state = found["main"], found["state"]
    return _database(main), None if main is state else _database(state)


def _database(section: Settings) -> SynapseDatabase:
    engine, args = section.text("name") or "sqlite3", section.section("args")
    if engine == "sqlite3":
        return _sqlite(args, "database")
    if engine != "psycopg2":
        raise section.wrong("name", "must be psycopg2 or sqlite3")
    return _postgresql(args)


def _sqlite(section: Settings, name: str) -> SynapseDatabase:
    path = section.path(name)
    if path is None or path.endswith("/:memory:"):
        raise section.wrong(name, "must be the path of a file")
    return SynapseDatabase(path, section.name_of("password"), None)


def _postgresql(args: Settings) -> SynapseDatabase:
    given = dict(_libpq(args))
    known = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    secret = {name for name in given if any(word in name for word in _SECRET_WORDS)}
    password = given.pop("password", None)
    user = given.pop("user", None)
    name = given.pop("dbname", None)
    if password is not None and user is None:
        raise args.wrong("user", "must be set, as there is a password")
    kept = {key: text for key, text in given.items() if key in known - secret}
    left_out = [args.name_of(key) for key in given if key not in kept and key not in _OURS]
    place = _host_and_port(args, kept.pop("host", None), kept.pop("port", None))
    for key in _OURS:
        kept.pop(key, None)
    for key in _FILES:
        if key in kept and kept[key] != "system":
            kept[key] = absolute(kept[key], args.file)
    query: dict[str, str | tuple[str, ...]] = {**kept, **place[2]}
    if name is not None and not _PLAIN_NAME.fullmatch(name):
        # In a URL's path it would have to be written as it is.
        query["dbname"], name = name, None
    url = URL.create(
        "postgresql", username=user, host=place[0], port=place[1], database=name, query=query
    )
    return SynapseDatabase(
        url.render_as_string(), args.name_of("password"), password, tuple(left_out)
    )


def _libpq(args: Settings) -> Iterator[tuple[str, str]]:
    """All connection settings, those of a connection string first. Raises ConfigError."""
    for name in ("dsn", "database", "dbname"):
        text = args.text(name)
        if text is not None and (name == "dsn" or "=" in text or "://" in text):
            yield from _connection_string(args, name, text)
    for name in args.values:
        if name == "dsn" or name.startswith(_NOT_LIBPQ):
            continue
        value = args.values[name]
        text = str(int(value)) if isinstance(value, bool) else args.text(name)
        if text is None or (name in ("database", "dbname") and ("=" in text or "://" in text)):
            continue
        yield "dbname" if name == "database" else name, text


def _connection_string(args: Settings, name: str, text: str) -> Iterator[tuple[str, str]]:
    try:
        found = conninfo.conninfo_to_dict(text)
    except (psycopg.Error, ValueError):
        # Their own words quote it.
        raise args.wrong(name, "is not a connection string of PostgreSQL") from None
    for key, value in found.items():
        if value is not None:
            if not is_plain(str(value)):
                raise args.wrong(name, "is not a connection string of PostgreSQL")
            yield key, str(value)


HostAndPort = tuple[str | None, int | None, dict[str, str | tuple[str, ...]]]


def _host_and_port(args: Settings, host: str | None, port: str | None) -> HostAndPort:
    """Host, port, and the part of the two that has to go into the query of a URL."""
    hosts = (host or "").split(",")
    ports = (port or "").split(",")
    numbers = [_port(args, text) for text in ports]
    if not all(_is_host(each) for each in hosts):
        raise args.wrong("host", "is not a host, an IP or the directory of a socket")
    if len(hosts) > 1:
        numbers = numbers * len(hosts) if len(numbers) == 1 else numbers
        if len(numbers) != len(hosts):
            raise args.wrong("port", "must be one, or as many as there are hosts")
        each = (f"{_in_brackets(one)}:{at or 5432}" for one, at in zip(hosts, numbers, strict=True))
        return None, None, {"host": tuple(each)}
    if hosts[0].startswith(("/", "@")):
        port_query: dict[str, str | tuple[str, ...]] = {"port": str(numbers[0])}
        return None, None, {"host": hosts[0], **(port_query if numbers[0] else {})}
    if numbers[0] and not hosts[0]:
        return None, None, {"port": str(numbers[0])}
    return hosts[0] or None, numbers[0], {}


def _port(args: Settings, text: str) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 0 < int(text) < 65_536):
        raise args.wrong("port", "must be a port")
    return int(text)


def _is_host(text: str) -> bool:
    if text.startswith(("/", "@")):
        return True
    return all(char.isascii() and (char.isalnum() or char in "._-:%") for char in text)


def _in_brackets(host: str) -> str:
    return f"[{host}]" if ":" in host else host
