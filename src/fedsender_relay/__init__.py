"""The relay: a log of the events stream for any homeserver, and its readers.

A homeserver appends records (`fedsender.embedded`). The `log` stores them in the relay's database,
and the `hub` sends them to the consumers.
"""
