"""The daemon's process, as the demo and the tests start it."""

import signal
from functools import partial
from pathlib import Path

import trio

from fedsender_lab.demo.process import STOP_SECONDS, end
from fedsender_lab.testing.clock import until


async def test_one_that_is_frozen_ends_at_once() -> None:
    """A test that fails while a daemon is frozen waits for it no longer than for any other."""
    with trio.fail_after(STOP_SECONDS / 2):
        async with trio.open_nursery() as nursery:
            run = partial(trio.run_process, ["sleep", "600"], check=False, deliver_cancel=end)
            process: trio.Process = await nursery.start(run)
            process.send_signal(signal.SIGSTOP)
            state = Path(f"/proc/{process.pid}/stat")
            await until(lambda: state.read_text().split()[2] == "T")
            nursery.cancel_scope.cancel()
    assert process.returncode == -signal.SIGTERM
