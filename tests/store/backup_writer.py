"""A process that writes into both databases, one after the other, until it is killed.

    python -m tests.store.backup_writer HOMESERVER_URL SENDER_URL

After each write to both, the homeserver's database has the mark N and the sender's the position N;
between the two writes the homeserver's is one ahead.
"""

import sys

import trio

from fedsender.runtime import real_runtime
from fedsender.store import HomeserverSettings, StoreConfig, open_store
from fedsender.store.records import StoredGeneration


def config(homeserver_url: str, sender_url: str) -> StoreConfig:
    settings = HomeserverSettings("embedded", "fed1", ("fed1",))
    return StoreConfig(settings, homeserver_url, sender_url, server_name="hs.example")


async def write(homeserver_url: str, sender_url: str) -> None:
    async with open_store(config(homeserver_url, sender_url), real_runtime()) as store:
        await store.sender.take_lock("boot")
        number = 0
        while True:
            number += 1
            await store.homeserver.adopt_generation(str(number))
            await store.sender.save_generation("fed1", StoredGeneration(number, str(number)))
            print(number, flush=True)


if __name__ == "__main__":
    trio.run(write, sys.argv[1], sys.argv[2])
