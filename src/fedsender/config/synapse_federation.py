"""How Synapse treats other servers, as our sections `federation` and `destinations`."""

import ipaddress
from collections.abc import Callable, Iterator
from typing import Any, Final

from fedsender.config.policy import Backoff
from fedsender.config.synapse_yaml import Settings, is_plain
from fedsender.config.values import is_pattern

HEALTHY_S: Final = 3600.0
LATELY_S: Final = 6 * 3600.0
MAX_MULTIPLIER: Final = 10.0
MAX_MORE_CA_FILES: Final = 100
MAX_OVERRIDES: Final = 10_000

Note = Callable[[str, str], None]
"""Says of a setting what became of it."""


def federation_of(settings: Settings, note: Note) -> dict[str, Any]:
    """The section `federation`. Raises ConfigError."""
    values: dict[str, Any] = {}
    if "outbound_federation_restricted_to" in settings:
        note(
            "outbound_federation_restricted_to",
            "is left out: other servers are connected to from here, not by way of these workers",
        )
    if not settings.flag("federation_verify_certificates", True):
        values["verify_certificates"] = False
    authorities = settings.paths("federation_custom_ca_list")
    if authorities and values:
        note("federation_custom_ca_list", "has no use with certificates unchecked")
    elif authorities:
        values["ca_file"] = authorities[0]
        if authorities[1:]:
            values["more_ca_files"] = list(authorities[1 : 1 + MAX_MORE_CA_FILES])
        if len(authorities) > 1 + MAX_MORE_CA_FILES:
            note("federation_custom_ca_list", f"only the first {1 + MAX_MORE_CA_FILES}")
    oldest = settings.text("federation_client_minimum_tls_version")
    if oldest in ("1.3", "1.2"):
        values["minimum_tls_version"] = oldest
    elif oldest is not None:
        note("federation_client_minimum_tls_version", "1.2 is the oldest that is spoken")
    timeout = settings.section("federation").seconds("client_timeout")
    if timeout is not None:
        values["request_timeout"] = max(1.0, clamped(timeout))
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
    backoff = _backoff(settings, note)
    if backoff:
        values["defaults"] = {"backoff": backoff}
    if not settings.flag("federation_verify_certificates", True):
        return values
    names = settings.texts("federation_certificate_verification_whitelist") or ()
    patterns = [name for name in names if is_pattern(name)]
    if patterns:
        values["overrides"] = [
            {"match": pattern, "verify_certificates": False} for pattern in patterns[:MAX_OVERRIDES]
        ]
        if not len(names) == len(patterns) <= MAX_OVERRIDES:
            note(
                "federation_certificate_verification_whitelist",
                f"only the first {MAX_OVERRIDES}, and only what can be a server's name",
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


def _backoff(settings: Settings, note: Note) -> dict[str, float]:
    """Synapse's waits between attempts, where they are set and bounds of ours allow."""
    section = settings.section("federation")
    first = section.seconds("destination_min_retry_interval")
    longest = section.seconds("destination_max_retry_interval")
    multiplier = section.number("destination_retry_multiplier")
    values: dict[str, float] = {}
    if first is not None:
        values["first"] = max(1.0, clamped(first))
    if multiplier is not None:
        values["multiplier"] = min(max(multiplier, 1.0), MAX_MULTIPLIER)
    if longest is not None:
        last = max(1.0, clamped(longest))
        least = values.get("first", 0.0)
        values["ceiling_healthy"] = max(least, min(last, HEALTHY_S))
        values["ceiling"] = max(values["ceiling_healthy"], min(last, LATELY_S))
        values["ceiling_dead"] = max(values["ceiling"], last)
    elif first is not None:
        values["ceiling_healthy"] = max(first, HEALTHY_S)
        values["ceiling"] = max(first, LATELY_S)
        values["ceiling_dead"] = max(first, 86_400.0)
    if values and any(Backoff.model_validate(values).contradictions()):
        note(
            "federation.destination_*retry*",
            "left out: a server that never answers would be tried more than 60 times a day",
        )
        return {}
    if values:
        note(
            "federation.destination_*retry*",
            "is carried over; without it (destinations.defaults.backoff) a server that was well is"
            " tried again after seconds",
        )
    return values


def clamped(seconds: float) -> float:
    """A duration that a setting of ours can hold."""
    return min(seconds, 10 * 365 * 86_400.0)


def _networks(settings: Settings, name: str) -> list[str]:
    return list(_each_network(settings, name))


def _each_network(settings: Settings, name: str) -> Iterator[str]:
    for text in settings.texts(name) or ():
        try:
            yield str(ipaddress.ip_network(text, strict=False))
        except ValueError:
            raise settings.wrong(name, "must be a list of IPs and IP ranges") from None
