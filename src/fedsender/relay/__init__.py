"""The relay: a log of the events stream for any homeserver, and its readers.

What a homeserver appends (`fedsender.intake`), the `log` makes durable in files of `segment`,
through the `disk` seam.
"""
