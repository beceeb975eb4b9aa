"""A shadow: it follows a live Synapse whose own worker sends, and says what it would have done.

It reads with a database role that may only SELECT, listens on Redis under a name of its own, says
nothing there but REPLICATE, and writes nothing but its report.

- `questions`: what it asks of Synapse's database.
- `book`: what should go to whom, held against what Synapse's worker has recorded.
- `report`: one JSON line per PDU and per difference, and the summary.
- `run`: the command.
"""
