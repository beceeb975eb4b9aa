"""What others put into a destination: calls that return at once and are safe at any moment."""

from collections.abc import Mapping
from typing import Any

import trio

from fedsender.config import Policy
from fedsender.matrix import Pdu
from fedsender.sender.context import Context
from fedsender.sender.edus.presence import LIFETIME_S as PRESENCE_LIFETIME_S
from fedsender.sender.edus.typing import LIFETIME_S as TYPING_LIFETIME_S
from fedsender.sender.edus.typing import TYPING, Typing
from fedsender.sender.failure import ServerState
from fedsender.sender.outbox import Outbox
from fedsender.sender.transaction import Key
from fedsender.store.records import PresenceState, Receipt


class Intake:
    """A server's outbox and who may put what into it. Each call wakes the destination's task."""

    def __init__(
        self, name: str, policy: Policy, context: Context, state: ServerState, *, level: bool
    ) -> None:
        """`level`: the database owes it nothing that will not be offered."""
        self.name = name
        self.policy = policy
        self.state = state
        self.outbox = Outbox(
            name,
            origin=context.origin,
            now_ms=context.outside.now_ms,
            homeserver=context.homeserver,
            store=context.store,
            edus=context.edus,
            device_lists=context.device_lists,
            router=context.router,
            metrics=context.metrics,
            window=context.window,
            queue_pdus=context.sending.queue_pdus,
            level=level,
        )
        self._woken = trio.Event()
        self._new_edus = False
        if not level:
            # Whatever waits in a database; the hints were for the object that was here before.
            self.owe_redeliveries()
            self.owe_keys()

    def offer(self, pdu: Pdu) -> None:
        """The fan-out has made it durable that this server is owed the PDU."""
        self.outbox.offer(pdu, healthy=self.state.healthy)
        self._woken.set()

    def spill(self) -> None:
        """Give the queued PDUs up; the database knows them."""
        self.outbox.spill(healthy=self.state.healthy)
        self._woken.set()

    def _edu_came(self) -> None:
        self._new_edus = True
        self._woken.set()

    def owe_keys(self) -> None:
        """There may be to-device messages, or device lists, for it in the database."""
        self.owe_to_device()
        self.owe_device_lists()

    def owe_to_device(self) -> None:
        """There are to-device messages for it in the database."""
        if self.policy.edus.to_device:
            self.outbox.owe_to_device()
            self._edu_came()

    def owe_device_lists(self) -> None:
        """There are changed devices or keys for it in the database."""
        if self.policy.edus.device_lists:
            self.outbox.owe_device_lists()
            self._edu_came()

    def put_receipt(self, receipt: Receipt) -> None:
        """One of our users has read something that it is to hear of."""
        if self.policy.edus.receipts:
            self.outbox.receipts.put(receipt)
            self._edu_came()

    def put_typing(self, typing: Typing) -> None:
        """One of our users types, or has stopped. Not worth a retry."""
        if self.policy.edus.typing and self.state.healthy:
            self.outbox.put_edu(typing.key, TYPING, typing.content(), lifetime_s=TYPING_LIFETIME_S)
            self._edu_came()

    def put_presence(self, state: PresenceState) -> None:
        """It is to hear how present one of our users is."""
        if self.policy.edus.presence:
            expires_at = trio.current_time() + PRESENCE_LIFETIME_S
            self.outbox.presence.put(state, expires_at=expires_at)
            self._edu_came()

    def put_edu(self, key: Key, edu_type: str, content: Mapping[str, Any]) -> None:
        """Send this EDU, unless a newer one of the same key replaces it or it grows too old.

        Raises:
            ValueError: its content has no canonical form.
        """
        self.outbox.put_edu(key, edu_type, content, lifetime_s=PRESENCE_LIFETIME_S)
        self._edu_came()

    def owe_redeliveries(self) -> None:
        """There are events to send it again."""
        self.outbox.owe_redeliveries()
        self._woken.set()
