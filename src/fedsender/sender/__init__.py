"""The sender: from the events stream to a transaction that is answered.

The homeserver writes an event; the *feed* learns that its events stream is complete up to some
token and moves a watermark. The *fan-out* reads the events up to there that it has not seen,
decides which of them this server must send and to which servers (`routing`), writes down the events
that each destination is owed, together with its own position, and only then offers the PDUs to the
destinations (I1).

A *destination* is one object and one task while there is something to do for its server. It is
*level* when everything it owes is in its queue, in stream order; otherwise what it owes is in the
database, and `catch_up` reads it from there. Each turn it connects first and only then forms a
transaction from whatever is waiting by now: to-device messages, redeliveries, PDUs, other EDUs.
Once a byte may have left, the transaction is frozen: the same id and the same bytes go out until
they are answered (I3). An answer moves three things, in this order: the ledger, the homeserver's
database (LSSO, the low-water mark of this destination), and the frozen record.

A failure moves the state machine in `failure`, which says how long to wait and whether the content
may be at fault. A wait longer than a few minutes is not waited for in memory: the destination is
put away, and a timer of the *sender* takes it out again. The sender also knows every server that
owes something at start-up and brings them back at a ramp, the most useful first.

Between two awaits the objects here own the world: verbs that change them are synchronous, and the
comments say where an `await` must not be added.
"""
