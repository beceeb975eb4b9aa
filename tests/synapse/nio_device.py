"""One device of a person who encrypts: a real client (matrix-nio), told what to do line by line.

A script of its own, run by the interpreter that has matrix-nio: `encrypted.py` speaks with it. On
standard input come orders, one JSON object per line, `{"id", "do", ...}`; on standard output go
`{"id", "answer"}` or `{"id", "error"}`, and what the client sees, `{"saw": kind, ...}`.

It does what people's clients do: syncs, uploads, queries and claims keys, and tries a message again
whose key comes late. A homeserver that does not answer, or answers 5xx, is asked again.
"""

import asyncio
import json
import sys
import time
from typing import Any

import nio  # type: ignore[import-not-found,unused-ignore]

POLL_MS = 5_000
PATIENCE_S = 300.0
# Without it a cut timeline would look like messages that are missing.
WHOLE_TIMELINES = {"room": {"timeline": {"limit": 1000}}}


def say(**fields: object) -> None:
    """One line to whoever started us."""
    print(json.dumps(fields), flush=True)


class Refused(Exception):
    """The homeserver said no; the text is its answer."""


def checked(answer: Any) -> Any:
    """The answer, unless it is an error."""
    if isinstance(answer, nio.ErrorResponse):
        raise Refused(str(answer))
    return answer


class PatientClient(nio.AsyncClient):  # type: ignore[misc,unused-ignore]
    """A client that asks again when a homeserver has a bad moment, as people's clients do.

    After its database was restarted Synapse answers 500 once for each connection in its pool.
    matrix-nio would take one such answer to a key share for having shared the key.
    """

    async def send(self, *args: Any, **kwargs: Any) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            answer = await super().send(*args, **kwargs)
            if answer.status < 500 or time.monotonic() > deadline:
                return answer
            answer.release()
            await asyncio.sleep(0.2)


class Device:
    """The client and what it has not been able to read yet."""

    def __init__(self, url: str, mxid: str, device_id: str, store: str) -> None:
        config = nio.AsyncClientConfig(
            store_sync_tokens=True,
            encryption_enabled=True,
            max_timeout_retry_wait_time=1,
            request_timeout=60,
        )
        self.client = PatientClient(url, mxid, device_id, store, config)
        self.unread: dict[str, Any] = {}
        self.seen: set[str] = set()
        self.client.add_event_callback(self.on_event, nio.Event)
        self.client.add_ephemeral_callback(self.on_ephemeral, nio.EphemeralEvent)
        self.client.add_presence_callback(self.on_presence, nio.PresenceEvent)

    # --- what it sees ---

    async def on_event(self, room: Any, event: Any) -> None:
        if isinstance(event, nio.MegolmEvent):
            if event.event_id not in self.seen:
                self.unread[event.event_id] = event
                say(saw="undecryptable", event_id=event.event_id, room=room.room_id)
        elif isinstance(event, nio.RoomMessageText):
            self.read(event, room.room_id)

    def read(self, event: Any, room_id: str) -> None:
        if event.event_id in self.seen:
            return
        self.seen.add(event.event_id)
        self.unread.pop(event.event_id, None)
        say(
            saw="message",
            event_id=event.event_id,
            room=room_id,
            sender=event.sender,
            text=event.body,
            decrypted=bool(event.decrypted),
            session=event.session_id,
        )

    def try_again(self) -> None:
        """Keys may have come since."""
        for event in list(self.unread.values()):
            try:
                self.read(self.client.decrypt_event(event), event.room_id)
            except nio.EncryptionError:
                continue

    async def on_ephemeral(self, room: Any, event: Any) -> None:
        if isinstance(event, nio.TypingNoticeEvent):
            say(saw="typing", room=room.room_id, users=event.users)
        elif isinstance(event, nio.ReceiptEvent):
            for receipt in event.receipts:
                say(
                    saw="receipt",
                    room=room.room_id,
                    user=receipt.user_id,
                    event_id=receipt.event_id,
                )

    async def on_presence(self, event: Any) -> None:
        say(saw="presence", user=event.user_id, presence=event.presence, status=event.status_msg)

    async def follow(self) -> None:
        """Sync for ever, and do between syncs what the client asks for."""
        while True:
            await self.client.sync(POLL_MS, WHOLE_TIMELINES)
            await self.do_errands()
            self.try_again()

    async def do_errands(self) -> None:
        if self.client.should_upload_keys:
            await self.client.keys_upload()
        if self.client.should_query_keys:
            await self.client.keys_query()
        if self.client.should_claim_keys:
            await self.client.keys_claim(self.client.get_users_for_key_claiming())
        await self.client.send_to_device_messages()

    # --- what it is told to do ---

    async def obey(self, order: dict[str, Any]) -> None:
        try:
            answer = await getattr(self, "do_" + order.pop("do"))(**order["with"])
        except (Refused, nio.LocalProtocolError, nio.exceptions.SendRetryError) as error:
            say(id=order["id"], error=repr(error))
        else:
            say(id=order["id"], answer=answer)

    async def do_create_room(self) -> str:
        encrypted = {
            "type": "m.room.encryption",
            "state_key": "",
            "content": {"algorithm": "m.megolm.v1.aes-sha2"},
        }
        answer = await self.client.room_create(
            preset=nio.RoomPreset.private_chat, initial_state=[encrypted]
        )
        return str(checked(answer).room_id)

    async def do_invite(self, room: str, mxid: str) -> None:
        checked(await self.client.room_invite(room, mxid))

    async def do_join(self, room: str) -> None:
        checked(await self.client.join(room))

    async def do_sees(self, room: str, mxid: str) -> bool:
        """Whether that user is in the room, encryption is on, and all members are known."""
        known = self.client.rooms.get(room)
        return known is not None and known.encrypted and mxid in known.users

    async def do_devices(self, mxid: str) -> list[str]:
        """The devices of a user that it would encrypt for."""
        if mxid in self.client.users_for_key_query:
            return []
        return [device.id for device in self.client.device_store.active_user_devices(mxid)]

    async def do_send(self, room: str, text: str) -> str:
        content = {"msgtype": "m.text", "body": text}
        answer = await self.client.room_send(
            room, "m.room.message", content, ignore_unverified_devices=True
        )
        return str(checked(answer).event_id)

    async def do_rotate(self, room: str) -> None:
        """Make a new key for the next message, which every device has to be told."""
        self.client.invalidate_outbound_session(room)

    async def do_type(self, room: str, typing: bool) -> None:
        checked(await self.client.room_typing(room, typing))

    async def do_read(self, room: str, event_id: str) -> None:
        checked(await self.client.update_receipt_marker(room, event_id))

    async def do_be(self, presence: str, status: str) -> None:
        checked(await self.client.set_presence(presence, status))


def report(task: asyncio.Task[None]) -> None:
    """Say so if it ended with an error."""
    if not task.cancelled() and task.exception() is not None:
        say(saw="broken", error=repr(task.exception()))


async def main(url: str, mxid: str, password: str, device_id: str, store: str) -> None:
    """Log in, follow, and obey until standard input ends."""
    device = Device(url, mxid, device_id, store)
    checked(await device.client.login(password))
    await device.client.sync(0, WHOLE_TIMELINES)
    await device.do_errands()
    say(saw="ready")
    following = asyncio.create_task(device.follow())
    following.add_done_callback(report)
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    obeying = set()
    while line := await reader.readline():
        task = asyncio.create_task(device.obey(json.loads(line)))
        obeying.add(task)
        task.add_done_callback(report)
        task.add_done_callback(obeying.discard)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await device.client.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
