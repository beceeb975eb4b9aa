"""The world around the daemon, for the demo, the simulation, benchmarks and tests.

Nothing here knows how a sender works: `rules` and `rooms` have the rules of the specification, so
that the two can disagree.

    rooms         a homeserver: events, members of rooms, and the servers that must get each event
    http          a server's side of a connection: requests out of bytes, and replies
    receiver      a remote server: its treatment of transactions, and the transactions it got
    rules         the rules that a remote server may expect a transaction to keep
    attacks       the answers of a hostile one
    network       names, addresses and connections in memory
    clock         virtual time, and chance that a seed decides
    certificates  an authority for servers on loopback
    children      the other processes of a run
"""
