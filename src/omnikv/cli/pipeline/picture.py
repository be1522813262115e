"""Latents as a picture: a small decoder with weights of its own, and PNG without any library."""

from __future__ import annotations

import struct
import zlib

import torch
import torch.nn.functional as F

_SCALE = 8
_WIDTH = 32
_SEED = 3


def decode(latents: torch.Tensor, grid: int) -> torch.Tensor:
    """A picture `[height, width, 3]` of uint8 from latents `[grid * grid, channels]`."""
    generator = torch.Generator().manual_seed(_SEED)
    planes = latents.t().reshape(1, -1, grid, grid)
    smooth = F.interpolate(planes, scale_factor=_SCALE, mode="bicubic", align_corners=False)
    inner = torch.randn(_WIDTH, latents.shape[1], 3, 3, generator=generator) / 3
    outer = torch.randn(3, _WIDTH, 1, 1, generator=generator) / _WIDTH**0.5
    hidden = torch.sin(F.conv2d(F.pad(smooth, (1, 1, 1, 1), mode="replicate"), inner))
    colours = torch.sigmoid(2 * F.conv2d(hidden, outer))
    return (colours[0].permute(1, 2, 0) * 255).round().to(torch.uint8)


def as_png(picture: torch.Tensor) -> bytes:
    """The file of a picture `[height, width, 3]` of uint8."""
    height, width, _ = picture.shape
    rows = b"".join(b"\0" + bytes(row.flatten().tolist()) for row in picture)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
