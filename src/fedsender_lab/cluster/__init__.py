"""A model of the protocol in docs/clusters-protocol.md, and a search of all its states.

It is in three parts. A model says which steps are possible in a state; `explore` tries them all, in
every order, faults included, and returns the shortest way to a state that must not be. `without`
leaves out a guard, to see that it is one.
"""

from fedsender_lab.cluster.feed import FEED_FAULTS as FEED_FAULTS
from fedsender_lab.cluster.feed import Feeds as Feeds
from fedsender_lab.cluster.leases import FAULTS as FAULTS
from fedsender_lab.cluster.leases import Leases as Leases
from fedsender_lab.cluster.lists import LIST_FAULTS as LIST_FAULTS
from fedsender_lab.cluster.lists import Lists as Lists
from fedsender_lab.cluster.search import Found as Found
from fedsender_lab.cluster.search import Model as Model
from fedsender_lab.cluster.search import explore as explore
