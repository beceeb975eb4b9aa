"""The limits and the treatment of one destination: defaults, and overrides by name or pattern.

Overrides are applied in the order of the file, a later one wins, setting by setting. `backoff` is
the exception: it is taken as a whole from the last override that has one (its missing settings come
from the defaults), so that every back-off that can take effect is checked when the file is loaded.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from fedsender.config.document import Location
from fedsender.config.values import Bytes, FilePath, FixedAddress, Seconds, ServerPattern
from fedsender.matrix import MAX_PDUS, Patterns

MAX_DAILY_ATTEMPTS: Final = 60
"""Attempts in any 24 h to a server that never answers, by our own timers (I5)."""
QUICK_ATTEMPTS: Final = 6
"""So many of them may follow a refusal at once, to find a poisonous item: no wait counts them."""
GAP_EVENTS: Final = 400
"""Catch-up reads so many events of a room to see how large its gap is."""

STEADY_S: Final = 10.0
"""A server that was healthy in the last 24 h is tried each 10 s at first: most are being restarted,
and a restart takes a minute or two."""
MULTIPLIER: Final = 2.0
"""Each further wait is twice as long as the one before, as Synapse and Dendrite have it."""
JITTER: Final = 0.2
"""Each wait is longer or shorter by up to this share of it: servers that failed at one moment, as
behind a broken proxy, are not all tried at one moment again."""

_DAY: Final = 86_400.0


Contradictions = Iterator[tuple[Location, str]]
"""The errors of values in combination, as (place below the section, sentence)."""


class Section(BaseModel):
    """A part of the configuration: complete, frozen, strict about types and names."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        hide_input_in_errors=True,
        # Defaults too are files relative to a directory, which only validation knows.
        validate_default=True,
        revalidate_instances="always",
    )

    def contradictions(self) -> Contradictions:
        """The errors of these values in combination."""
        yield from ()

    def all_contradictions(self) -> Contradictions:
        """Those of the sections in this one, and its own."""
        for name in type(self).model_fields:
            section = getattr(self, name)
            if isinstance(section, Section):
                for place, text in section.all_contradictions():
                    yield (name, *place), text
        yield from self.contradictions()


class Backoff(Section):
    """How long to wait after failed attempts in a row."""

    steady_for: Seconds = Field(
        default=120.0,
        ge=0,
        description="How long a server that was healthy in the last 24 h is tried every 10 s"
        " (or every first, if that is longer) before its waits grow; 0: they grow at"
        " once.",
    )
    first: Seconds = Field(
        default=5.0,
        ge=1,
        description="Wait after the first failed attempt; each further wait is twice as long.",
    )
    ceiling_healthy: Seconds = Field(
        default=3600.0,
        ge=1,
        description="Longest wait while the server was healthy in the last 24 h.",
    )
    ceiling: Seconds = Field(
        default=6 * 3600.0,
        ge=1,
        description="Longest wait while the server was healthy in the last week.",
    )

    @property
    def ceiling_dead(self) -> float:
        """Longest wait for a server that was not healthy for a week, in seconds.

        One attempt a day costs nobody anything, and finds a server again that was given up.
        """
        return max(self.ceiling, _DAY)

    def contradictions(self) -> Contradictions:
        if not self.first <= self.ceiling_healthy <= self.ceiling:
            yield (), "first <= ceiling_healthy <= ceiling does not hold"
        attempts = self.daily_attempts()
        if attempts > MAX_DAILY_ATTEMPTS:
            yield (
                (),
                f"a server that never answers would see more than {MAX_DAILY_ATTEMPTS} attempts in"
                " 24 h: raise first or ceiling_healthy, or lower steady_for",
            )

    def wait(self, failures: int, elapsed: float, *, steady: bool) -> float:
        """Seconds to wait after a failed attempt, before ceiling and jitter.

        Args:
            failures: in a row, before this one.
            elapsed: seconds since the first of them.
            steady: the server was healthy lately, and fails as one does that is restarted.
        """
        # 2**40 seconds is past every ceiling; without the bound the power overflows.
        if not steady or not self.steady_for:
            return self.first * MULTIPLIER ** min(failures, 40)
        pause = max(STEADY_S, self.first)
        most = math.ceil(self.steady_for / (pause * (1 - JITTER)))
        if elapsed < self.steady_for and failures < most:
            return pause
        # By time, because attempts may last as long as waits; by count, because clocks are set.
        later = elapsed - self.steady_for
        by_time = pause * MULTIPLIER + later * (MULTIPLIER - 1)
        by_count: float = pause * MULTIPLIER ** min(max(0, failures - most), 40)
        return max(by_time, by_count)

    def daily_attempts(self) -> int:
        """The most attempts in any 24 h to a server that never answers; counts no further than 61.

        With every wait as short as jitter allows and each attempt failing at once, in whichever way
        is retried sooner. Waits never shrink, so the first 24 h are the worst, and in those the
        ceiling is that of a server that was healthy until now.
        """
        attempts, elapsed = 1 + QUICK_ATTEMPTS, 0.0
        failures = 0
        while attempts <= MAX_DAILY_ATTEMPTS:
            sooner = min(self.wait(failures, elapsed, steady=kind) for kind in (True, False))
            elapsed += max(1.0, min(sooner, self.ceiling_healthy) * (1 - JITTER))
            if elapsed > _DAY:
                break
            attempts += 1
            failures += 1
        return attempts


class EduKinds(Section):
    """Which kinds of EDU a destination gets."""

    typing: bool = Field(default=True, description="Who is typing.")
    receipts: bool = Field(default=True, description="Who has read up to where.")
    presence: bool = Field(default=True, description="Who is online.")


class Policy(Section):
    """How one destination is treated."""

    max_pdus: int = Field(
        default=MAX_PDUS, ge=1, le=MAX_PDUS, description="PDUs in one transaction."
    )
    max_transaction_bytes: Bytes = Field(
        default=2**20, ge=128 * 2**10, le=64 * 2**20, description="Size of one transaction's body."
    )
    request_timeout: Seconds = Field(
        default=60.0, gt=0, description="How long one attempt may take, answer included."
    )
    backoff: Backoff = Field(
        default_factory=Backoff,
        description="Waits after failures; an override's backoff counts as a whole.",
    )
    catch_up_gap_events: int = Field(
        default=100,
        ge=0,
        le=GAP_EVENTS,
        description="A room's gap of at most so many events is sent whole, a larger one as its"
        " newest event. A gap with more than 400 events of all servers is large, too.",
    )
    address: FixedAddress | None = Field(
        default=None, description='Connect to this "ip:port" and skip discovery.'
    )
    ca_file: FilePath | None = Field(
        default=None,
        description="Certificates to trust for this destination; null takes federation's.",
    )
    verify_certificates: bool | None = Field(
        default=None,
        description="Whether to check its certificate; null takes federation's"
        " (Synapse's federation_certificate_verification_whitelist).",
    )
    edus: EduKinds = Field(default_factory=EduKinds, description="Which kinds of EDU it gets.")


class Override(Policy):
    """Settings for the destinations that a name or pattern matches; unset ones stay as they are."""

    match: ServerPattern = Field(
        description="A server name, or a pattern with * and ?; without a port, on every port."
    )


class Destinations(Section):
    """How destinations are treated."""

    defaults: Policy = Field(default_factory=Policy, description="What holds for every server.")
    overrides: tuple[Override, ...] = Field(
        default=(),
        max_length=10_000,
        description="Exceptions, each with a match and any settings of defaults; later ones win.",
    )

    def policy_for(self, server: str) -> Policy:
        """The policy that holds for `server`. Worth remembering."""
        policy = self.defaults
        for place in self._matches.matching(server):
            policy = self._apply(policy, self.overrides[place])
        return policy

    @cached_property
    def _matches(self) -> Patterns:
        return Patterns(each.match for each in self.overrides)

    def _apply(self, policy: Policy, override: Override) -> Policy:
        changes: dict[str, Any] = {
            name: getattr(override, name) for name in override.model_fields_set - {"match"}
        }
        if "backoff" in changes:
            changes["backoff"] = _merged(self.defaults.backoff, override.backoff)
        if "edus" in changes:
            changes["edus"] = _merged(policy.edus, override.edus)
        return policy.model_copy(update=changes)

    def settings_for(self, server: str) -> Iterator[tuple[str, object, Sequence[Location]]]:
        """Every setting that holds for `server`: its name, its value, its possible places.

        The last item lists places below `destinations`, strongest first; the first of them that
        the file has is the one that set the value.
        """
        found = self._matches.matching(server)
        policy = self.policy_for(server)
        backoffs = [i for i in found if "backoff" in self.overrides[i].model_fields_set][-1:]
        for path, value in leaves(policy):
            setters = backoffs if path[0] == "backoff" else found[::-1]
            places: list[Location] = [("overrides", index, *path) for index in setters]
            yield ".".join(path), value, (*places, ("defaults", *path))

    def contradictions(self) -> Contradictions:
        for index, override in enumerate(self.overrides):
            if "backoff" in override.model_fields_set:
                for _, text in _merged(self.defaults.backoff, override.backoff).contradictions():
                    yield ("overrides", index, "backoff"), text


S = TypeVar("S", bound=Section)


def _merged(base: S, changes: S) -> S:
    update = {name: getattr(changes, name) for name in changes.model_fields_set}
    return base.model_copy(update=update)


def leaves(
    section: Section, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], object]]:
    """Every setting in a section and the sections in it: its path below `path`, and its value."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name), value
