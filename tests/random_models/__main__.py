"""`nox -s random`."""

import sys

from random_models.session import main

if __name__ == "__main__":
    sys.exit(main())
