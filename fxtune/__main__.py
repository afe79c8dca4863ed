"""`python -m fxtune`, and the console script `fxtune`."""

import os
import sys

PACKAGES = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

if __name__ == "__main__" and os.path.realpath(os.curdir) == os.path.realpath(sys.path[0]) != PACKAGES:
    # `python -m` searches the working directory first: a wandb.py among a user's data must not be imported.
    del sys.path[0]
    os.environ["PYTHONSAFEPATH"] = "1"  # for child processes

from fxtune.system.process.bytecode import keep_compiled_files  # noqa: E402  after the check of sys.path

keep_compiled_files()

from fxtune.cli.main import main  # noqa: E402  its imports are the first large ones

if __name__ == "__main__":
    sys.exit(main())
