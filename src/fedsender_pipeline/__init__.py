"""The data pipeline: proof of delivery, on Spark, from a laptop to a cluster.

`ingest` brings the data of a homeserver and of the ledger into a lake of Parquet files (`lake`,
`schemas`). Every other job is a read of the lake, transforms from DataFrame to DataFrame, and a
write. The servers that should get each event are never stored per event and server. They are stored
as intervals of stream orderings per room and server (`intervals`), and the ledger is compared with
those.

Nothing of the daemon imports this package. `commands` imports the module of a job, and with it
Spark, when the job runs.
"""

from typing import Final

from fedsender.console import Mistake

SKEW_MS: Final = 300_000


def latest_ms() -> int:
    """The reader's clock plus 5 minutes, in ms since the epoch.

    No stored time counts as later than this. Otherwise one clock that was once a year ahead would
    make everything after it look old.
    """
    # Here, because the command line's help waits for whatever is imported above.
    from fedsender.runtime import real_runtime

    return real_runtime().now_ms() + SKEW_MS


class PipelineError(Exception):
    """A job cannot go on; the text names the file, table or setting, and the remedy."""


class Busy(PipelineError):
    """Another job works on the lake: this one has found no fault, and may be tried later."""


class Usage(PipelineError, Mistake):
    """The job cannot be done with this configuration."""
