"""The whole thing in one go: a homeserver's stream, the real daemon, and servers that receive.

`run_demo` starts a small homeserver that serves its events stream over the TCP line protocol, the
daemon in a process of its own, and receiving servers on loopback TLS. It lets events happen (and,
with chaos, everything go wrong that goes wrong in a federation), waits until every event is where
it should be, and holds three witnesses against each other: the homeserver, the receiving servers
and the daemon's ledger.

`receivers` and `homeserver` stand on their own: tests and benchmarks use them too.
"""

from fedsender.demo.play import DemoOptions, run_demo

__all__ = ["DemoOptions", "run_demo"]
