"""A store of our own, and the endpoint through which a homeserver fills it.

For a homeserver that does not let us read its database. Who runs Synapse may leave this package
alone: `open_store` finds the store by its name, `open_feed` the feed by an entry point.

A record goes this way: `endpoint` takes the request, `intake` checks it and finds its place,
`writer` puts records in one line and has them stored in groups, `appends` gives each its token, and
`feeding` writes its rows. `stays` says who is in a room, `store` answers the sender. `push` is the
feed that ties them together.
"""
