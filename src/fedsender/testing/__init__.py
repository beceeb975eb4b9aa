"""The world around the daemon, for the demo, the simulation, benchmarks and tests.

Nothing here knows how a sender works: `rules` and `rooms` say from the specification what it should
do, so that the two can disagree.

    rooms         a homeserver: events, who is in which room, and who must get what
    http          a server's side of a connection: requests out of bytes, and replies
    receiver      a remote server: how it treats transactions, and what it was sent
    rules         what a remote server may expect of a transaction
    attacks       what a hostile one answers
    network       names, addresses and connections in memory
    clock         virtual time, and chance that a seed decides
    certificates  an authority for servers on loopback
    children      the other processes of a run
"""
