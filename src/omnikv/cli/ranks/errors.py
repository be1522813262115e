"""What can end a run of several processes early."""

from __future__ import annotations

from omnikv.errors import OmniKVError


class RunFailed(OmniKVError):
    """A run could not be carried through; the message says which part, why, and what to do."""
