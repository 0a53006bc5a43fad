"""`nox -s fuzz`."""

import sys

from fuzz.session import main

if __name__ == "__main__":  # workers import this file as well
    sys.exit(main())
