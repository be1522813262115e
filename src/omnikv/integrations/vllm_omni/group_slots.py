"""The process groups that a stand-in for an engine's parallel state knows, until someone sets them none."""

from __future__ import annotations

from typing import Any

from omnikv.errors import ConfigError, LocalProtocolError


class GroupSlots:
    """Named places for group objects; a place is either filled or "not initialised".

    A group is anything with `world_size`, `rank_in_group`, `send_object(obj, dst)`, `recv_object(src)` and
    `broadcast_object(obj, src)`, as engines' group coordinators have them.
    """

    def __init__(self, module: str, names: tuple[str, ...]) -> None:
        self._module = module
        self._groups: dict[str, Any] = dict.fromkeys(names)

    def get(self, name: str) -> Any:
        """The group in the place `name`.

        Engines fail an assertion here. Their callers catch any exception and go on without the group, so the type is
        free; an assertion would vanish under `python -O`, hence one of ours, which is a RuntimeError.

        Raises:
            LocalProtocolError: nobody has set it.
        """
        group = self._groups[name]
        if group is None:
            raise LocalProtocolError(
                f"the {name} group is not initialized: no engine runs in this process; call "
                f"{self._module}.set_groups({name}=...) to lend one"
            )
        return group

    def is_set(self, name: str) -> bool:
        """Whether `get(name)` has something to give."""
        return self._groups[name] is not None

    def put(self, groups: dict[str, Any]) -> None:
        """Nothing; afterwards exactly these groups are set.

        Raises:
            ConfigError: a group lacks its size or its own rank.
        """
        for name, group in groups.items():
            if group is not None and not (hasattr(group, "world_size") and hasattr(group, "rank_in_group")):
                raise ConfigError(f"the {name} group has no world_size or no rank_in_group: {group!r}")
        self._groups.update(groups)
