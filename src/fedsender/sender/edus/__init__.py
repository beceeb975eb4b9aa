"""EDUs: the content of each kind, when it is due, and its servers.

One module for each kind decides; none of them waits. `flow` waits: it follows the homeserver's
streams, asks the database which servers are concerned, and puts EDUs that are due into their
outboxes.
"""
