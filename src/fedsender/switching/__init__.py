"""Switching: a shadow beside Synapse's worker, the hand-back to it, and the list of senders.

- `shadow`: follows a live Synapse while Synapse's own worker sends, and compares.
- `comparison`: the deliveries that we expect, against those that Synapse's worker has recorded.
- `handback`: leaves the homeserver's database as Synapse's worker expects it.
- `senders`: the list of several senders, and how it changes while they run.
"""
