"""What can end a demo early."""

from __future__ import annotations

from omnikv.errors import OmniKVError


class DemoFailed(OmniKVError):
    """The demo could not be carried through; the message says which part, why, and what to do."""
