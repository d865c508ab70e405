"""Errors that a user can do something about. `cli` prints them without a traceback.

Every error takes one string, so that it survives pickling through Ray; `exit_code` is what the
process ends with.
"""


class TqppoError(Exception):
    """Base class of errors shown to the user as a message, without a traceback."""

    exit_code = 1


class UsageError(TqppoError):
    """The command line asks for something that does not exist."""

    exit_code = 2


class ConfigError(TqppoError):
    """The config does not compile."""

    exit_code = 3


class PreflightError(TqppoError):
    """The machine or the environment lacks what the plan needs."""

    exit_code = 4


class BackendError(PreflightError):
    """A back end is missing, or cannot be started."""


class CheckpointError(TqppoError):
    """A checkpoint is corrupt, partial, or does not fit the config."""

    exit_code = 5


class TrainingAborted(TqppoError):
    """A policy of the config (failed groups, non-finite loss, …) ended the run."""

    exit_code = 6


class OutOfSpace(TqppoError):
    """A file system or shared memory is full; the message names the folder, the bytes wanted and the bytes free."""


class OutOfDescriptors(TqppoError):
    """A process, or the machine, has no further file descriptor; the message has the limit."""


class OutOfDeviceMemory(TqppoError):
    """A GPU has no room; the message names it, what is on it and which settings need less."""


class LockLost(TqppoError):
    """Another process has taken over the run that this one works on."""


class DataError(TqppoError):
    """A dataset, a prompt or a reward function is invalid."""


class QueueError(TqppoError):
    """The transfer queue refuses: unknown key or column, wrong shape, over budget."""


class DeadlineExceeded(QueueError):
    """A wait ended at its deadline; the message names what was missing."""


class DataLost(QueueError):
    """Rows are gone because a storage or the index died; the message names keys, columns, node."""


class EngineError(TqppoError):
    """A rollout engine died, or its answer is invalid; the message carries the end of its log."""


class PeerFailed(EngineError):
    """A transfer of weights to several engines ended because another one of them failed; the message says which."""


class WorkerError(TqppoError):
    """A training worker failed or died; the message names its rank and carries its traceback."""


class ClusterLost(TqppoError):
    """Ray's own processes died or stand still; the message names which."""


class OutOfMemory(TqppoError):
    """Ray ended a process because its node ran out of memory; the message has the figures and what to lower."""
