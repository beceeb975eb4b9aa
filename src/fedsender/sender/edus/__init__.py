"""EDUs: the content of each kind, the time when it is due, and its servers.

Each kind has one module, which decides and never waits. `flow` waits: it follows the homeserver's
streams, asks the database which servers are concerned, and puts EDUs that are due into their
outboxes.
"""
