"""`python -m fxtune`."""

import os
import sys

if __name__ == "__main__" and os.path.realpath(sys.path[0]) == os.path.realpath(os.curdir):
    # `python -m` searches the working directory first: a wandb.py among a user's data must not be imported.
    if os.path.realpath(sys.path[0]) != os.path.dirname(os.path.dirname(os.path.realpath(__file__))):
        del sys.path[0]
        os.environ["PYTHONSAFEPATH"] = "1"  # for child processes

from fxtune.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
