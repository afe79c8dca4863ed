"""`python -m fxtune`."""

import os
import sys

if __name__ == "__main__":
    here = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    if os.path.realpath(sys.path[0]) == os.path.realpath(os.curdir) != here:
        # `python -m` looks for modules in the working directory first: a wandb.py among somebody's data must not be imported.
        del sys.path[0]
        os.environ["PYTHONSAFEPATH"] = "1"  # for the processes that start below
    from fxtune.cli.main import main

    sys.exit(main())
