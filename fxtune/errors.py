"""The errors a user can mend. Each class is an exit code; each message says what, where and what to change.

`ValueError` is their root because that is what they are: a value somebody gave. A bug of ours stays an `AssertionError`
or whatever Python raised, with its traceback.
"""


class UserError(ValueError):
    """Something the user gave cannot be used. The message alone must be enough to mend it."""

    exit_code = 2


class ConfigError(UserError):
    """A recipe, a config group or a command-line override is wrong."""

    exit_code = 2


class DataError(UserError):
    """A dataset, a row or a chat template is wrong."""

    exit_code = 3


class HardwareError(UserError):
    """This machine cannot do what was asked."""

    exit_code = 4


class NumbersError(UserError):
    """Training went non-finite and stopped before it could harm the weights."""

    exit_code = 5


class StorageError(UserError):
    """A disk, a checkpoint or a run folder cannot be used."""

    exit_code = 6


class HubError(StorageError):
    """Something of the hub is not on this disk, and the hub cannot be reached for it."""


class CheckError(UserError):
    """What `fxtune verify` or `fxtune doctor` looked at is not as it should be. Their tables said so already."""

    exit_code = 1
