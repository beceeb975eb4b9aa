"""`python -m fedsender`, and the file to give to `spark-submit`."""

import sys

if not __package__:
    # Run as a file: our modules' names are not those of others' modules.
    sys.path.pop(0)

from fedsender.cli import main

if __name__ == "__main__":
    main()
