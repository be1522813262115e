"""Where tensors lie: moved to a device, copied out of borrowed memory, kept safe from a stream's early reuse."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

TensorMap = Callable[[torch.Tensor], torch.Tensor]
# What holds no tensors, or is not to be taken apart in search of them.
_OPAQUE = (str, bytes, int, float, type, ModuleType, FunctionType, MethodType)


def move_tensors(value: Any, device: torch.device | str | None) -> Any:
    """`value` with every tensor in it on `device`, contiguous; itself where nothing has to move.

    Containers and objects are copied only as far as a tensor inside them moves, and an object met twice stays one
    object. `device` None moves nothing.
    """
    if device is None:
        return value
    target = torch.device(device)
    return map_tensors(value, lambda tensor: tensor if _is_on(tensor, target) else tensor.to(target).contiguous())


def detach_from_buffers(value: Any) -> Any:
    """`value` with every tensor on the CPU and in memory of its own, as an object broadcast needs it.

    Pickling a tensor writes its whole storage: a view into a payload of 256 MiB would send all of it, once a view.
    """
    return map_tensors(value, _own_cpu_memory)


def map_tensors(value: Any, change: TensorMap) -> Any:
    """`value` with `change` applied to each tensor, copied only where a tensor changed; shared parts stay shared."""
    return _map(value, change, {})


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Each tensor anywhere inside `value`."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    yield from found


def borrows_from(tensor: torch.Tensor, buffers: Iterable[torch.Tensor]) -> bool:
    """Whether the tensor's first byte lies inside one of these buffers, so that it dies with it."""
    start = tensor.data_ptr()
    return any(
        tensor.device == buffer.device and buffer.data_ptr() <= start < buffer.data_ptr() + buffer.nbytes
        for buffer in buffers
    )


def record_current_stream(value: Any) -> None:
    """Nothing; tells the allocator that the current stream uses the CUDA tensors in `value`.

    They were filled on another stream, whose memory could otherwise be handed out again while this one still reads.
    """
    for tensor in tensors_in(value):
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def has_free_memory(device: torch.device | None, ratio: float) -> bool:
    """Whether at least `ratio` of the device's memory is free; True where it cannot be told."""
    mem_get_info = getattr(getattr(torch, device.type, None), "mem_get_info", None) if device is not None else None
    if ratio <= 0 or mem_get_info is None:
        return True
    try:
        free, total = mem_get_info(device)
    except (AssertionError, RuntimeError):
        # No such device, or it does not say.
        return True
    return bool(total <= 0 or free / total >= ratio)


def _is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    # "cuda" without an index means the current one; `.to` knows it and then does not copy.
    return tensor.device == device


def _own_cpu_memory(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cpu":
        return tensor.detach().cpu()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    return tensor


def _map(value: Any, change: TensorMap, seen: dict[int, tuple[Any, Any]]) -> Any:
    if value is None or isinstance(value, _OPAQUE):
        return value
    if id(value) in seen:
        return seen[id(value)][1]
    if isinstance(value, torch.Tensor):
        result: Any = change(value)
    else:
        # Entered before its parts, so that a cycle ends; the original is kept so that its id is not used again.
        seen[id(value)] = (value, value)
        result = _map_parts(value, change, seen)
    seen[id(value)] = (value, result)
    return result


def _map_parts(value: Any, change: TensorMap, seen: dict[int, tuple[Any, Any]]) -> Any:
    if isinstance(value, dict):
        changed = {key: new for key, old in value.items() if (new := _map(old, change, seen)) is not old}
        return _with_items(value, changed) if changed else value
    if isinstance(value, list | tuple):
        items = [_map(item, change, seen) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return items if isinstance(value, list) else tuple(items)
    fields = {name: new for name, old in _fields_of(value) if (new := _map(old, change, seen)) is not old}
    return _with_fields(value, fields) if fields else value


def _with_fields(value: Any, changed: dict[str, Any]) -> Any:
    struct_fields = getattr(value, "__struct_fields__", None)
    if struct_fields is not None:
        # A msgspec struct lets nobody set the fields of a frozen one.
        return type(value)(**{name: changed.get(name, getattr(value, name)) for name in struct_fields})
    result = copy.copy(value)
    for name, new in changed.items():
        # The object may be frozen; the copy is ours.
        object.__setattr__(result, name, new)
    return result


def _with_items(value: dict[Any, Any], changed: dict[Any, Any]) -> dict[Any, Any]:
    # A copy keeps its kind: an ordered one, one with defaults.
    result = copy.copy(value)
    result.update(changed)
    return result


def _fields_of(value: Any) -> Iterator[tuple[str, Any]]:
    """An object's own fields by name, whether it keeps them in a dict or in slots."""
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)
