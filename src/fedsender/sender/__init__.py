"""The sender: from the events stream to a transaction that is answered.

The homeserver writes an event. The *feed* learns that the events stream is complete up to some
token, and moves a watermark. The *fan-out* reads the new events up to the watermark. It decides
which of them this server must send, and to which servers (`routing`). It writes down the events
that each destination is owed, together with its own position. Only then it offers the PDUs to the
destinations (I1).

A *destination* is one object and one task while there is something to do for its server. It is
*level* when all PDUs that it is owed are in its queue, in stream order. Otherwise they are in the
database, and `catch_up` reads them there. For each attempt it connects first. Then it forms a
transaction from the items that wait now: to-device messages, redeliveries, PDUs, other EDUs.
Once a byte may have left, the transaction is frozen: the same id and the same bytes go out until
they are answered (I3). An answer moves three things, in this order: the ledger, the homeserver's
database (LSSO, the low-water mark of this destination), and the frozen record.

A failure changes the server's state by the rules in `failure`: how long to wait, and whether the
content may be at fault. During a wait of more than a few minutes the destination leaves memory, and
a timer of the *sender* brings it back. At start-up the sender also knows every server that is owed
something, and brings them back at a bounded pace (the ramp), the most useful first.

Between two awaits no other task changes the objects here: the methods that change them are
synchronous, and comments mark the places where an `await` must not be added.
"""
