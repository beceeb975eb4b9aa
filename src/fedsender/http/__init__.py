"""The HTTP server: `server` answers clients; `application` is what the applications share."""
