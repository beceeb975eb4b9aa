"""EDUs: what each kind says, when it is due, and to whom it goes.

One module for each kind decides; none of them waits. `flow` waits: it follows the homeserver's
streams, asks the database which servers are concerned, and puts what is due into their outboxes.
"""
