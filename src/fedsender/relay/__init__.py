"""The relay: a log of the events stream for any homeserver, and its readers.

`facts` is what a homeserver may say; `intake` takes it (`intake_app` over HTTP, `client` is the
homeserver's side), `log` makes it durable in files of `segment`, through the `disk` seam.
"""
