"""The layout of page records and of weights: docs/format.md, sections 8, 12 and 13, in Python.

A cache is uint8 [num_pages, num_kv_heads, record_bytes]. A record holds page_size tokens of one
head in tiles of up to 32 tokens. `Record` says which bits of which bytes hold the code of a token
and channel, and where the scales are; `LatentRecord` is the same for caches of latents, uint8
[num_pages, record_bytes], and `WeightBlock` for weights of linear layers. The rest of this file
reads and writes whole records and blocks with numpy, for the references and the tests; no fast path
uses it.

The layout lets a store write whole bytes of its own token only, and gives attention kernels the
operands of 8-bit tensor-core instructions without a shuffle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from torch_turboquant.signs import split_dim

FORMAT_VERSION = 1

KEY_BITS = (2, 3, 4, 5, 8)
VALUE_BITS = (2, 3, 4, 8)
PAGE_SIZES = (16, 32, 64, 128)
MAX_HEAD_DIM = 1024
MAX_VECTOR_DIM = 4096
MAX_TILE = 32
VALUE_GROUP = 16

LATENT_DIMS = (128, 256, 512)
ROPE_DIMS = (0, 32, 64)
LATENT_BITS = (3, 4, 5, 8)
LATENT_PAGE_SIZES = (32, 64, 128)

WEIGHT_ROWS = 16
WEIGHT_BITS = (4, 8)
WEIGHT_GROUPS = (64, 128)
SUB_CHANNELS = 32
MULTIPLIER_OFFSET = 12
MULTIPLIER_UNIT = 1 / 16
MAX_WEIGHT_GROUPS = 2**20
MAX_WEIGHT_ROWS = 2**31


class Piece(NamedTuple):
    """Bits of a code within one byte.

    Bits shift .. shift + width - 1 of byte `byte` hold the bits of the code from code_shift on.
    """

    byte: int
    shift: int
    width: int
    code_shift: int


def valid_vector_dim(d: int) -> bool:
    """Whether the transform exists for d channels (section 2): m * 2^k, odd m <= 9, k >= 1."""
    if not 2 <= d <= MAX_VECTOR_DIM:
        return False
    try:
        return split_dim(d)[1] > 1
    except ValueError:
        return False


def valid_head_dim(d: int) -> bool:
    """Whether page records exist for d channels (section 8)."""
    return d % 16 == 0 and d <= MAX_HEAD_DIM and valid_vector_dim(d)


def dense_row_bytes(d: int, bits: int) -> int:
    """Bytes of a standalone row of d codes (section 7)."""
    return (d * bits + 7) // 8


def _round_up_4(n: int) -> int:
    return (n + 3) // 4 * 4


def _row_bytes(channels: int, bits: int) -> int:
    """Bytes of the row of a token's codes: of its key or its latent."""
    three = _round_up_4(3 * channels // 8)
    return {8: channels, 5: channels // 2, 4: channels // 2, 3: three, 2: channels // 4}[bits]


def _plane_bytes(channels: int, bits: int) -> int:
    """Bytes of the bit plane of a token's codes."""
    return _round_up_4(channels // 8) if bits == 5 else 0


def _code(channels: int, bits: int, row: int, plane: int, c: int) -> list[Piece]:
    """The bits of the code of channel c in a row and a plane that begin at these bytes."""
    if bits in (8, 4, 2):
        per_byte = 8 // bits
        return [Piece(row + c // per_byte, bits * (c % per_byte), bits, 0)]

    group = c // 32
    width = min(32, channels - 32 * group)
    j, i = divmod(c % 32, width // 4)
    if bits == 5:
        return [
            Piece(row + c // 2, 4 * (c % 2), 4, 0),
            Piece(plane + 4 * group + i // 2, 2 * j + i % 2, 1, 4),
        ]
    nibbles = row + 12 * group + i // 2
    word = width // 8
    if j < 3:
        return [Piece(nibbles + j * word, 4 * (i % 2), 3, 0)]
    return [Piece(nibbles + k * word, 4 * (i % 2) + 3, 1, k) for k in range(3)]


def _sections(**sizes: int) -> dict[str, tuple[int, int]]:
    """Sections of these sizes after each other: name -> (first byte, bytes), without empty ones."""
    out, start = {}, 0
    for name, size in sizes.items():
        if size:
            out[name] = (start, size)
        start += size
    return out


@dataclass(frozen=True)
class Record:
    """The geometry of the record of one (page, KV head). Offsets are bytes from its start.

    Args:
        head_dim: a multiple of 16 up to 1024 of the form m * 2^k, m one of 1, 3, 5, 7, 9.
        page_size: 16, 32, 64 or 128 tokens.
        key_bits: 2, 3, 4, 5 or 8.
        value_bits: 2, 3, 4 or 8.

    Raises:
        ValueError: anything else.
    """

    head_dim: int
    page_size: int
    key_bits: int
    value_bits: int

    def __post_init__(self) -> None:
        if not valid_head_dim(self.head_dim):
            raise ValueError(
                f"head_dim is {self.head_dim}, supported in page records: multiples of 16 up to "
                f"{MAX_HEAD_DIM} of the form m * 2^k with m in {{1, 3, 5, 7, 9}}"
            )
        if self.page_size not in PAGE_SIZES:
            raise ValueError(f"page_size is {self.page_size}, supported: 16, 32, 64, 128")
        if self.key_bits not in KEY_BITS:
            raise ValueError(f"key_bits is {self.key_bits}, supported: 2, 3, 4, 5, 8")
        if self.value_bits not in VALUE_BITS:
            raise ValueError(f"value_bits is {self.value_bits}, supported: 2, 3, 4, 8")

    # ---- sizes

    @cached_property
    def tile_tokens(self) -> int:
        return min(self.page_size, MAX_TILE)

    @cached_property
    def key_row_bytes(self) -> int:
        return _row_bytes(self.head_dim, self.key_bits)

    @cached_property
    def key_plane_bytes(self) -> int:
        return _plane_bytes(self.head_dim, self.key_bits)

    @cached_property
    def value_block_bytes(self) -> int:
        d = self.head_dim
        three = 384 * (d // 64) + 8 * (d % 64)
        return {8: 16 * d, 4: 8 * d, 3: three, 2: 4 * d}[self.value_bits]

    @cached_property
    def sections(self) -> dict[str, tuple[int, int]]:
        """Sections of a tile in order: name -> (first byte, bytes). Empty sections are left out."""
        tokens = self.tile_tokens
        return _sections(
            key_rows=tokens * self.key_row_bytes,
            key_planes=tokens * self.key_plane_bytes,
            value_blocks=tokens // VALUE_GROUP * self.value_block_bytes,
            key_scales=2 * tokens,
            value_scales=2 * tokens,
        )

    @cached_property
    def tile_bytes(self) -> int:
        return sum(size for _, size in self.sections.values())

    @cached_property
    def record_bytes(self) -> int:
        return self.page_size // self.tile_tokens * self.tile_bytes

    # ---- places

    def _tile(self, token: int) -> int:
        return token // self.tile_tokens * self.tile_bytes

    def key_scale(self, token: int) -> int:
        """First byte of the key scale of a token of the page."""
        return self._tile(token) + self.sections["key_scales"][0] + 2 * (token % self.tile_tokens)

    def value_scale(self, token: int) -> int:
        """First byte of the value scale of a token of the page."""
        return self._tile(token) + self.sections["value_scales"][0] + 2 * (token % self.tile_tokens)

    def key(self, token: int, channel: int) -> list[Piece]:
        """The bits of the key code of one channel of one token of the page."""
        tile, inside = self._tile(token), token % self.tile_tokens
        row = tile + inside * self.key_row_bytes
        planes, _ = self.sections.get("key_planes", (0, 0))
        plane = tile + planes + inside * self.key_plane_bytes
        return _code(self.head_dim, self.key_bits, row, plane, channel)

    def value(self, token: int, channel: int) -> list[Piece]:
        """The bits of the value code of one channel of one token of the page."""
        inside = token % self.tile_tokens
        blocks = self._tile(token) + self.sections["value_blocks"][0]
        block = blocks + inside // VALUE_GROUP * self.value_block_bytes
        s = inside % VALUE_GROUP
        q, b = s % 8 // 2, s % 2 + 2 * (s // 8)
        g = channel % 8
        lane = 4 * g + q

        if self.value_bits == 3:
            chunk = block + 384 * (channel // 64)
            j, e = channel // 16 % 4, channel // 8 % 2
            if channel // 64 == self.head_dim // 64:
                words = self.head_dim % 64 // 16
                return [Piece(chunk + 4 * words * lane + 4 * j + b, 4 * e, 3, 0)]
            if j < 3:
                return [Piece(chunk + 12 * lane + 4 * j + b, 4 * e, 3, 0)]
            return [Piece(chunk + 12 * lane + 4 * k + b, 4 * e + 3, 1, k) for k in range(3)]

        unit_channels = 64 // self.value_bits
        units = self.head_dim // unit_channels
        unit = channel // unit_channels
        if unit == units:  # 2 bits: the last 16 channels, four channels of one token in a byte
            byte = block + 128 * units + 16 * (g % 4) + 4 * q + b
            return [Piece(byte, 4 * (g // 4) + 2 * (channel // 8 % 2), 2, 0)]
        words = min(4, units - unit // 4 * 4)
        byte = block + 512 * (unit // 4) + 4 * words * lane + 4 * (unit % 4) + b
        e = channel // 8 % (8 // self.value_bits)
        return [Piece(byte, self.value_bits * e, self.value_bits, 0)]


@dataclass(frozen=True)
class LatentRecord:
    """The geometry of a page of latents (section 12). Offsets are bytes from its start.

    Args:
        latent_dim: channels of a latent: 128, 256 or 512.
        rope_dim: raw channels beside it, of two bytes each: 0, 32 or 64.
        page_size: 32, 64 or 128 tokens.
        bits: of a code: 3, 4, 5 or 8.

    Raises:
        ValueError: anything else.
    """

    latent_dim: int
    rope_dim: int
    page_size: int
    bits: int

    def __post_init__(self) -> None:
        if self.latent_dim not in LATENT_DIMS:
            raise ValueError(f"latent_dim is {self.latent_dim}, supported: 128, 256, 512")
        if self.rope_dim not in ROPE_DIMS:
            raise ValueError(f"rope_dim is {self.rope_dim}, supported: 0, 32, 64")
        if self.page_size not in LATENT_PAGE_SIZES:
            raise ValueError(f"page_size is {self.page_size}, supported for latents: 32, 64, 128")
        if self.bits not in LATENT_BITS:
            raise ValueError(f"bits is {self.bits}, supported for latents: 3, 4, 5, 8")

    @property
    def tile_tokens(self) -> int:
        return MAX_TILE

    @cached_property
    def row_bytes(self) -> int:
        return _row_bytes(self.latent_dim, self.bits)

    @cached_property
    def plane_bytes(self) -> int:
        return _plane_bytes(self.latent_dim, self.bits)

    @cached_property
    def sections(self) -> dict[str, tuple[int, int]]:
        """Sections of a tile in order: name -> (first byte, bytes). Empty sections are left out."""
        return _sections(
            rows=MAX_TILE * self.row_bytes,
            planes=MAX_TILE * self.plane_bytes,
            ropes=MAX_TILE * 2 * self.rope_dim,
            scales=MAX_TILE * 2,
        )

    @cached_property
    def tile_bytes(self) -> int:
        return sum(size for _, size in self.sections.values())

    @cached_property
    def record_bytes(self) -> int:
        return self.page_size // MAX_TILE * self.tile_bytes

    def _place(self, section: str, token: int, size: int) -> int:
        """First byte of a token of the page in a section, which has `size` bytes per token."""
        start, _ = self.sections.get(section, (0, 0))
        return token // MAX_TILE * self.tile_bytes + start + token % MAX_TILE * size

    def scale(self, token: int) -> int:
        """First byte of the scale of a token of the page."""
        return self._place("scales", token, 2)

    def rope(self, token: int, channel: int) -> int:
        """First byte of a raw channel of a token of the page."""
        size = 2 * self.rope_dim
        return self._place("ropes", token, size) + _swapped(size, token, 2 * channel)

    def code(self, token: int, channel: int) -> list[Piece]:
        """The bits of the code of one channel of one token of the page."""
        row = self._place("rows", token, self.row_bytes)
        plane = self._place("planes", token, self.plane_bytes)
        pieces = _code(self.latent_dim, self.bits, row, plane, channel)
        return [self._in_its_row(piece, row, token) for piece in pieces]

    def _in_its_row(self, piece: Piece, row: int, token: int) -> Piece:
        """The piece where the token has it, if it is one of its row and not of its plane."""
        byte = piece.byte - row
        if not 0 <= byte < self.row_bytes:
            return piece
        return piece._replace(byte=row + _swapped(self.row_bytes, token, byte))


def _swapped(size: int, token: int, byte: int) -> int:
    """Where a token has byte `byte` of a row of `size` bytes, whose words of 16 change places."""
    words, word = size // 16, byte // 16
    if words % 8 == 0:
        word ^= token % 8
    elif words % 4 == 0:
        word ^= token // 2 % 4
    return 16 * word + byte % 16


def weight_subs(bits: int) -> tuple[int, ...]:
    """The values of `sub` that weights of so many bits can have: 8 bits have no multipliers."""
    return (0,) if bits == 8 else (0, SUB_CHANNELS)


@dataclass(frozen=True)
class WeightBlock:
    """A block of a weight [n, k]: 16 rows (outputs) and `group` channels (inputs).

    Args:
        group: 64 or 128 channels of a row that share a scale.
        bits: 4 or 8.
        sub: 32 channels share a multiplier; 0: there are no multipliers (the only choice at 8
            bits).

    Raises:
        ValueError: anything else; the text names what is supported.
    """

    group: int
    bits: int
    sub: int

    def __post_init__(self) -> None:
        if self.group not in WEIGHT_GROUPS:
            raise ValueError(f"group is {self.group}, supported for weights: 64, 128")
        if self.bits not in WEIGHT_BITS:
            raise ValueError(f"bits is {self.bits}, supported for weights: 4, 8")
        if self.sub not in weight_subs(self.bits):
            supported = ", ".join(map(str, weight_subs(self.bits)))
            raise ValueError(f"sub is {self.sub}, supported at {self.bits} bits: {supported}")

    @property
    def subs(self) -> int:
        """Multipliers of a row."""
        return self.group // self.sub if self.sub else 0

    @property
    def scales(self) -> int:
        """First byte of the scales."""
        return 2 * self.group * self.bits

    @property
    def multipliers(self) -> int:
        """First byte of the multipliers."""
        return self.scales + 2 * WEIGHT_ROWS

    @property
    def block_bytes(self) -> int:
        return self.multipliers + WEIGHT_ROWS * self.subs // 2

    def code(self, row: int, channel: int) -> Piece:
        """The bits of the code of one channel of one row of the block."""
        half, g = divmod(row, 8)
        step, right, t = channel // 32, channel // 16 % 2, channel // 4 % 4
        steps = 8 // self.bits  # of a chunk
        lane = 512 * (step // steps) + 16 * (4 * g + t)
        if self.bits == 8:
            return Piece(lane + 4 * (2 * right + half) + channel % 4, 0, 8, 0)
        nibble = 4 * right + channel % 4
        word = lane + 4 * (2 * (step % steps) + half)
        return Piece(word + nibble // 2, 4 * (nibble % 2), 4, 0)

    def _pair_order(self, row: int) -> int:
        return 2 * (row % 8) + row // 8

    def scale(self, row: int) -> int:
        """First byte of the scale of a row."""
        return self.scales + 2 * self._pair_order(row)

    def multiplier(self, row: int, s: int) -> Piece:
        """The bits of the multiplier's code of channels 32 s to 32 s + 31 of a row."""
        byte = self.multipliers + self.subs // 2 * self._pair_order(row) + s // 2
        return Piece(byte, 4 * (s % 2), 4, 0)

    def packed_shape(self, n: int, k: int) -> tuple[int, int, int]:
        """The shape of the packed weight [n, k]: [tiles, groups, block_bytes]."""
        return -(-n // WEIGHT_ROWS), k // self.group, self.block_bytes


# ---- whole records with numpy


class _Places(NamedTuple):
    """The pieces of all codes of a tile: int64 [tokens, channels, 3]; unused ones have mask 0."""

    byte: np.ndarray
    shift: np.ndarray
    mask: np.ndarray
    code_shift: np.ndarray


def _places(record: Record, kind: str) -> _Places:
    # all tiles of a page have the same layout
    return _tile_places(replace(record, page_size=record.tile_tokens), kind)


@lru_cache(maxsize=64)
def _tile_places(record: Record, kind: str) -> _Places:
    place = getattr(record, kind)
    table = np.zeros((record.tile_tokens, record.head_dim, 3, 4), dtype=np.int64)
    for token in range(record.tile_tokens):
        for channel in range(record.head_dim):
            for i, piece in enumerate(place(token, channel)):
                table[token, channel, i] = piece
    byte, shift, width, code_shift = np.moveaxis(table, -1, 0)
    return _Places(byte, shift, (1 << width) - 1, code_shift)


def _tiles(record: Record, records: np.ndarray) -> np.ndarray:
    """[..., record_bytes] -> [..., tiles, tile_bytes]"""
    count = record.page_size // record.tile_tokens
    return records.reshape(*records.shape[:-1], count, record.tile_bytes)


def _read(record: Record, kind: str, records: np.ndarray) -> np.ndarray:
    places = _places(record, kind)
    tiles = _tiles(record, records)
    parts = (tiles[..., places.byte] >> places.shift & places.mask) << places.code_shift
    codes = parts.sum(-1).astype(np.uint8)
    return codes.reshape(*records.shape[:-1], record.page_size, record.head_dim)


def read_keys(record: Record, records: np.ndarray) -> np.ndarray:
    """Key codes of whole records: uint8 [..., record_bytes] -> [..., page_size, head_dim]."""
    return _read(record, "key", records)


def read_values(record: Record, records: np.ndarray) -> np.ndarray:
    """Value codes of whole records: uint8 [..., record_bytes] -> [..., page_size, head_dim]."""
    return _read(record, "value", records)


def read_scales(record: Record, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Key and value scales of whole records: float16 [..., page_size] each."""
    tiles = _tiles(record, records)
    out = []
    for name in ("key_scales", "value_scales"):
        start, size = record.sections[name]
        part = np.ascontiguousarray(tiles[..., start : start + size]).view("<f2")
        out.append(part.reshape(*records.shape[:-1], record.page_size))
    return out[0], out[1]


def own_bytes(record: Record, token: int) -> np.ndarray:
    """All bytes that a store of one token of the page writes, padding included: int64 [n]."""
    tile, inside = divmod(token, record.tile_tokens)
    row, plane = record.key_row_bytes, record.key_plane_bytes
    parts = [np.arange(inside * row, (inside + 1) * row)]
    if plane:
        planes = record.sections["key_planes"][0]
        parts.append(planes + np.arange(inside * plane, (inside + 1) * plane))
    values = _places(record, "value")
    used = values.byte[inside][values.mask[inside] > 0]
    parts.append(np.unique(used))
    for name in ("key_scales", "value_scales"):
        parts.append(record.sections[name][0] + 2 * inside + np.arange(2))
    return tile * record.tile_bytes + np.sort(np.concatenate(parts))


def unused_bits(record: Record) -> np.ndarray:
    """The bits that no code and no scale has, as 1: uint8 [record_bytes].

    A store writes 0 there, and every reader ignores them (section 8).
    """
    used = np.zeros(record.tile_bytes, dtype=np.uint8)
    for kind in ("key", "value"):
        places = _places(record, kind)
        np.bitwise_or.at(used, places.byte, (places.mask << places.shift).astype(np.uint8))
    used[record.sections["key_scales"][0] :] = 0xFF
    return np.tile(~used, record.page_size // record.tile_tokens)


def write_token(
    record: Record,
    data: np.ndarray,
    token: int,
    key_codes: np.ndarray,
    value_codes: np.ndarray,
    key_scale: np.ndarray,
    value_scale: np.ndarray,
) -> None:
    """Writes one token of one record in place: exactly the bytes of own_bytes, with unused bits 0.

    Args:
        data: uint8 [record_bytes].
        token: 0 .. page_size - 1.
        key_codes, value_codes: uint8 [head_dim].
        key_scale, value_scale: float16 scalars.
    """
    tile, inside = divmod(token, record.tile_tokens)
    data[own_bytes(record, token)] = 0
    part = data[tile * record.tile_bytes : (tile + 1) * record.tile_bytes]
    for kind, codes in (("key", key_codes), ("value", value_codes)):
        places = _places(record, kind)
        bits = codes.astype(np.int64)[:, None] >> places.code_shift[inside] & places.mask[inside]
        # the pieces of one byte do not overlap, so that adding them is or-ing them
        np.add.at(part, places.byte[inside], (bits << places.shift[inside]).astype(np.uint8))
    for place, scale in (
        (record.key_scale(inside), key_scale),
        (record.value_scale(inside), value_scale),
    ):
        part[place : place + 2] = np.asarray(scale, dtype="<f2").reshape(1).view(np.uint8)


# ---- whole records of latents


@lru_cache(maxsize=64)
def _latent_places(record: LatentRecord) -> _Places:
    """The pieces of all codes of a record: int64 [page_size, latent_dim, 3]."""
    table = np.zeros((record.page_size, record.latent_dim, 3, 4), dtype=np.int64)
    for token in range(record.page_size):
        for channel in range(record.latent_dim):
            for i, piece in enumerate(record.code(token, channel)):
                table[token, channel, i] = piece
    byte, shift, width, code_shift = np.moveaxis(table, -1, 0)
    return _Places(byte, shift, (1 << width) - 1, code_shift)


def latent_own_bytes(record: LatentRecord, token: int) -> np.ndarray:
    """All bytes of a page that belong to one of its tokens: int64 [n]."""
    pieces = _latent_places(record)
    codes = np.unique(pieces.byte[token][pieces.mask[token] > 0])
    rope = [record.rope(token, c) + i for c in range(record.rope_dim) for i in range(2)]
    scale = record.scale(token) + np.arange(2)
    return np.sort(np.concatenate([codes, np.asarray(rope, dtype=np.int64), scale]))


class LatentPages(NamedTuple):
    """What whole records of latents hold."""

    codes: np.ndarray
    """uint8 [..., page_size, latent_dim]."""
    ropes: np.ndarray
    """uint16 [..., page_size, rope_dim]: the bits of the raw channels."""
    scales: np.ndarray
    """float16 [..., page_size]."""


def read_latents(record: LatentRecord, records: np.ndarray) -> LatentPages:
    """Codes, raw channels and scales of whole records: uint8 [..., record_bytes]."""
    places = _latent_places(record)
    parts = (records[..., places.byte] >> places.shift & places.mask) << places.code_shift
    token, channel = range(record.page_size), range(record.rope_dim)
    scales = _words(records, [[record.scale(t)] for t in token]).view("<f2")
    return LatentPages(
        parts.sum(-1).astype(np.uint8),
        _words(records, [[record.rope(t, c) for c in channel] for t in token]),
        scales.reshape(scales.shape[:-1]),
    )


def _words(records: np.ndarray, first: list[list[int]]) -> np.ndarray:
    """The 16-bit words that begin at these bytes: uint16 [..., tokens, words of a token]."""
    byte = np.asarray(first, dtype=np.int64)[:, :, None] + np.arange(2)
    words = np.ascontiguousarray(records[..., byte]).view("<u2")[..., 0]
    return words.copy()  # without elements, a view has strides that torch does not take


def write_latent(
    record: LatentRecord,
    data: np.ndarray,
    token: int,
    codes: np.ndarray,
    rope: np.ndarray,
    scale: np.ndarray,
) -> None:
    """Writes one token of one record in place, all of whose bits have a meaning.

    Args:
        data: uint8 [record_bytes].
        token: 0 .. page_size - 1.
        codes: uint8 [latent_dim].
        rope: uint16 [rope_dim], the bits of the raw channels.
        scale: float16 scalar.
    """
    places = _latent_places(record)
    byte, mask, shift = places.byte[token], places.mask[token], places.shift[token]
    data[byte[mask > 0]] = 0
    bits = (codes.astype(np.int64)[:, None] >> places.code_shift[token] & mask) << shift
    np.add.at(data, byte, bits.astype(np.uint8))
    first = [record.scale(token), *(record.rope(token, c) for c in range(record.rope_dim))]
    for place, word in zip(first, [scale, *rope], strict=True):
        raw = np.asarray(word).reshape(1)
        data[place : place + 2] = raw.astype(raw.dtype.newbyteorder("<")).view(np.uint8)


# ---- whole blocks of weights


class WeightParts(NamedTuple):
    """What the blocks of a weight [n, k] hold."""

    codes: np.ndarray
    """uint8 [n, k]."""
    scale: np.ndarray
    """float16 [n, k / group]."""
    multipliers: np.ndarray
    """uint8 [n, k / 32], the codes of the multipliers; [n, 0] without them."""


@lru_cache(maxsize=16)
def _weight_places(block: WeightBlock) -> tuple[np.ndarray, ...]:
    """Bytes and shifts of codes [16, group] and multipliers [16, subs], bytes of scales [16]."""
    rows = range(WEIGHT_ROWS)
    codes = np.array([[block.code(r, c)[:2] for c in range(block.group)] for r in rows])
    subs = np.array([[block.multiplier(r, s)[:2] for s in range(block.subs)] for r in rows])
    subs = subs.reshape(WEIGHT_ROWS, block.subs, 2).astype(int)
    scales = np.array([block.scale(r) for r in rows])
    shifts = (part[..., 1].astype(np.uint8) for part in (codes, subs))
    return codes[..., 0], next(shifts), subs[..., 0], next(shifts), scales


def write_weight(block: WeightBlock, parts: WeightParts) -> np.ndarray:
    """The packed weight: uint8 [tiles, groups, block_bytes]."""
    (n, k), g = parts.codes.shape, block.group
    tiles, groups, size = block.packed_shape(n, k)
    fill = [(0, tiles * WEIGHT_ROWS - n), (0, 0)]
    code, code_shift, sub, sub_shift, scale = _weight_places(block)

    def blocks(part: np.ndarray, count: int) -> np.ndarray:
        """[n, groups * count] -> [16, count, blocks]"""
        whole = np.pad(part, fill).reshape(tiles, WEIGHT_ROWS, groups, count)
        return whole.transpose(1, 3, 0, 2).reshape(WEIGHT_ROWS, count, tiles * groups)

    data = np.zeros((size, tiles * groups), dtype=np.uint8)
    # the codes of one byte do not overlap, so that adding them is or-ing them
    np.add.at(data, code, blocks(parts.codes, g) << code_shift[..., None])
    np.add.at(data, sub, blocks(parts.multipliers, block.subs) << sub_shift[..., None])
    halves = blocks(parts.scale, 1).astype("<f2").view("<u2")[:, 0]
    data[scale], data[scale + 1] = halves & 255, halves >> 8
    return np.ascontiguousarray(data.T).reshape(tiles, groups, size)


def read_weight(block: WeightBlock, packed: np.ndarray, n: int) -> WeightParts:
    """What a packed weight uint8 [tiles, groups, block_bytes] of n rows holds."""
    tiles, groups, _ = packed.shape
    code, code_shift, sub, sub_shift, scale = _weight_places(block)

    def rows(part: np.ndarray) -> np.ndarray:
        """[tiles, groups, 16, count] -> [n, groups * count]"""
        return np.ascontiguousarray(part.transpose(0, 2, 1, 3)).reshape(
            tiles * WEIGHT_ROWS, groups * part.shape[3]
        )[:n]

    mask = (1 << block.bits) - 1
    halves = np.ascontiguousarray(packed[..., scale[:, None] + np.arange(2)]).view("<f2")
    return WeightParts(
        rows(packed[..., code] >> code_shift & mask).astype(np.uint8),
        rows(halves),
        rows(packed[..., sub] >> sub_shift & 15).astype(np.uint8),
    )
