"""The small HTTP server that the admin endpoint, metrics, intake and the relay share.

`serving` listens; `http1` speaks HTTP/1.1; `access` is the only way in (token, sizes, deadlines);
`application` has what the applications behind it share: bodies that are checked, and errors of one
kind.
"""
