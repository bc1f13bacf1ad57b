"""Exceptions that users can meet, each naming cause, numbers and the way out."""

from __future__ import annotations


class LockstepError(Exception):
    """Base of every error that Lockstep raises on purpose."""


class ConfigError(LockstepError, ValueError):
    """A model or engine configuration that cannot work."""


class UnsupportedModelError(ConfigError):
    """A checkpoint of a family, or with an option, that is not implemented."""


class CheckpointError(LockstepError):
    """A checkpoint folder whose files are missing, damaged or do not fit the model."""


class RequestError(LockstepError, ValueError):
    """A request refused at admission; nothing else in flight is disturbed."""


class PlanError(LockstepError):
    """A recorded plan that cannot be replayed on this engine as it stands."""


class IntegrityError(LockstepError, AssertionError):
    """An invariant of the bookkeeping that does not hold: a fault in an engine."""


class OutOfBlocksError(LockstepError):
    """The block pool cannot give what was asked for, even after eviction."""
