"""A federation sender daemon for Matrix homeservers."""
