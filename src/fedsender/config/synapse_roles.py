"""Which of Synapse's processes does what: who sends, who writes events, who is asked over HTTP."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fedsender.config.synapse_yaml import Settings
from fedsender.config.values import parse_http_peer

MAIN: Final = "master"
"""The main process by its name on the wire; in `instance_map` it is `main`."""
OURS: Final = "fedsender"
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_ONE_PROCESS: Final = (
    "run_background_tasks_on",
    "update_user_directory_from_worker",
    "notify_appservices_from_worker",
    "media_instance_running_background_jobs",
)
_PROCESSES: Final = ("pusher_instances", "outbound_federation_restricted_to")


@dataclass(frozen=True, slots=True)
class Roles:
    """See the module.

    Attributes:
        instance: whose place we take.
        senders: all federation senders, in Synapse's order.
        event_writers: the processes that write events.
        peers: where those are that have what is in no database, by their names on the wire.
    """

    instance: str
    senders: tuple[str, ...]
    event_writers: tuple[str, ...]
    peers: Mapping[str, str]


def roles_of(settings: Settings, wanted: str | None, notes: list[str]) -> Roles:
    """Raises ConfigError. What an operator has to do is added to `notes`."""
    senders = _names(settings, "federation_sender_instances")
    instance = _instance(settings, senders, wanted)
    if senders in (None, (MAIN,)):
        senders = (instance,)
        if settings.flag("send_federation", True):
            notes.append(
                "federation_sender_instances: Synapse's main process sends itself; before the"
                " first start set `send_federation: false` and"
                f" `federation_sender_instances: [{instance}]` there, and restart it"
            )
    _refuse_other_duties(settings, instance)
    writers = settings.section("stream_writers")
    event_writers = _names(writers, "events") or (MAIN,)
    if senders and len(senders) > 1:
        notes.append(
            "sender_database: there are several federation senders; where more than one is ours,"
            " let them share one PostgreSQL database, or drain each before the list changes"
        )
    return Roles(instance, senders or (), event_writers, _peers(settings, writers, notes))


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
    if senders and senders != (MAIN,) and chosen not in senders:
        raise settings.wrong("federation_sender_instances", f"does not name {chosen}")
    return chosen


def _refuse_other_duties(settings: Settings, instance: str) -> None:
    """Raise ConfigError where the process whose place we take does what we do not."""
    writers = settings.section("stream_writers")
    for name in writers.values:
        if instance in (writers.texts(name) or ()):
            raise writers.wrong(name, f"names {instance}, which only sends: give it to another")
    for name in _ONE_PROCESS:
        if settings.values.get(name) == instance:
            raise settings.wrong(name, f"names {instance}, which only sends: give it to another")
    for name in _PROCESSES:
        if instance in (settings.texts(name) or ()):
            raise settings.wrong(name, f"names {instance}, which only sends: give it to another")


def _peers(settings: Settings, writers: Settings, notes: list[str]) -> dict[str, str]:
    """The addresses of those who have typing, presence and the stream called `federation`."""
    instances = settings.section("instance_map")
    asked = {MAIN, *(_names(writers, "typing") or ()), *(_names(writers, "presence") or ())}
    peers: dict[str, str] = {}
    for name in sorted(asked):
        key = "main" if name == MAIN and "main" in instances else name
        if key in instances:
            peers[name] = _address(instances.section(key))
        elif name == MAIN and "worker_replication_http_port" in settings:
            peers[name] = _old_address(settings)
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


def _old_address(settings: Settings) -> str:
    """As a worker's file named the main process before there was an `instance_map`."""
    host = settings.text("worker_replication_host") or "localhost"
    port = settings.integer("worker_replication_http_port", 0, least=1, most=65_535)
    tls = settings.flag("worker_replication_http_tls", False)
    return _checked(settings, "worker_replication_host", _joined(host, port, tls=tls))


def _joined(host: str, port: int, *, tls: bool) -> str:
    bare = host.strip("[]")
    return f"{'https://' if tls else ''}{f'[{bare}]' if ':' in bare else bare}:{port}"


def _checked(settings: Settings, name: str, address: str) -> str:
    try:
        parse_http_peer(address)
    except ValueError:
        raise settings.wrong(name, "is not an address that can be connected to") from None
    return address
