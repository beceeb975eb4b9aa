"""A complete example: a homeserver's stream, the real daemon, and servers that receive.

`run_demo` starts a small homeserver, the daemon in a process of its own (or two, behind a relay),
and receiving servers on loopback TLS. It makes events (and, with chaos, the usual faults of a
federation), and waits until every event is where it should be. Then it compares three witnesses:
the homeserver, the receiving servers and the daemon's ledger.

Receiving servers and homeserver are those of `fedsender_lab.testing`, which tests and benchmarks
use too.
"""

from fedsender_lab.demo.play import DemoOptions, run_demo

__all__ = ["DemoOptions", "run_demo"]
