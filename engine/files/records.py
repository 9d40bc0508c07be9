"""Records of a file of ``torch.save``, a zip archive, with a single possible interpretation.

A zip archive lists its content twice, in its directory and before each record, and readers differ in which list they
use. In files of `torch.save`, both lists agree, the directory is at the very end, and there is nothing before, between
or after the records, where a reader of another format could find a different file. Everything else is rejected, so
that every reader reads the checked content.

The format: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

__all__ = ["Record", "check_bytes", "read_record", "records_of"]

_MOST = 100_000  # records of a file
_FULL = 0xFFFFFFFF  # placeholder for a number in the zip64 fields
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_HEADER = struct.Struct("<4s5H3L2H")
_ENCRYPTED, _SIZES_BEHIND = 1, 8  # flags
_BEHIND = (0, 12, 16, 20, 24)  # possible lengths of a data descriptor: checksum and sizes, with or without signature
# Names of records that `torch.save` writes. Other names can make torch read a file differently, as TorchScript.
_NAMES = frozenset({"data.pkl", "byteorder", "version", ".format_version", ".storage_alignment"})
_FOLDERS = ("data", ".data")


@dataclass(frozen=True)
class Record:
    """A record of an archive.

    Attributes:
        name: name without the common folder.
        start: start in the file.
        size: size in bytes.
        checksum: CRC-32 of its bytes; 0 where `torch.save` was told to write none.
    """

    name: str
    start: int
    size: int
    checksum: int


@dataclass(frozen=True)
class _Entry:
    """Directory entry of a record."""

    name: bytes
    flags: int
    checksum: int
    size: int
    offset: int


def records_of(file: BinaryIO) -> dict[str, Record]:
    """Return the records of an archive by name, without their common folder.

    Args:
        file: file opened for reading.

    Raises:
        ValueError: if it is not such an archive, or is ambiguous.
    """
    size = file.seek(0, os.SEEK_END)
    count, start, end = _directory(file, size)
    entries = sorted(_entries(_part(file, start, end - start), count), key=lambda entry: entry.offset)
    if len({entry.name.lower() for entry in entries}) < len(entries):
        raise ValueError("it contains two records of the same name")
    if len({entry.name.partition(b"/")[0] for entry in entries}) > 1:
        raise ValueError("its records are in several folders")
    records, free = {}, range(1)  # possible starts of the next record
    for entry in entries:
        _check_place(entry.offset, free, f"its record {_text(entry.name)!r}")
        record = _located(file, entry, start)
        records[record.name] = record
        ends = record.start + record.size
        free = range(ends, ends + (_BEHIND[-1] if entry.flags & _SIZES_BEHIND else 0) + 1)
    _check_place(start, free, "its directory")
    return records


def _check_place(place: int, free: range, what: str) -> None:
    """Reject overlaps, and gaps that could contain other content."""
    if place < free.start:
        raise ValueError(f"{what} overlaps with a record")
    if place - free.start not in _BEHIND or place not in free:
        raise ValueError(f"there are extra bytes before {what}")


def read_record(file: BinaryIO, record: Record) -> bytes:
    """Return the bytes of a record.

    Raises:
        ValueError: if the file ends before the record, or it is damaged.
    """
    data = _part(file, record.start, record.size)
    check_bytes(record, data)
    return data


def check_bytes(record: Record, data: bytes | memoryview) -> None:
    """Check the bytes of a record against its checksum, which no reader of torch looks at.

    Raises:
        ValueError: if they differ.
    """
    if record.checksum and zlib.crc32(data) != record.checksum:
        raise ValueError(f"its record {record.name!r} was modified (its CRC-32 differs)")


def _part(file: BinaryIO, start: int, size: int) -> bytes:
    file.seek(start)
    data = file.read(size)
    if len(data) != size:
        raise ValueError("it is shorter than it claims")
    return data


def _directory(file: BinaryIO, size: int) -> tuple[int, int, int]:
    """Return the number of records, and start and end of the directory."""
    if size < _END.size:
        raise ValueError("it is not an archive")
    place = size - _END.size
    sign, disk, first, here, count, length, start, comment = _END.unpack(_part(file, place, _END.size))
    if sign != b"PK\5\6" or comment or disk or first or here != count:
        raise ValueError("it does not end with the directory of an archive")
    if place >= _LOCATOR.size and _part(file, place - _LOCATOR.size, 4) == b"PK\6\7":
        wide = _wide_directory(file, place - _LOCATOR.size)
        for old, new, full in zip((count, length, start), wide, (0xFFFF, _FULL, _FULL), strict=False):
            if old not in (new, full):
                raise ValueError("it has two different directories")
        count, length, start, place = wide
    if start + length != place or count > _MOST or count * _ENTRY.size > length:
        raise ValueError("its directory does not have the size that it claims")
    return count, start, place


def _wide_directory(file: BinaryIO, locator: int) -> tuple[int, int, int, int]:
    """Return count, length and start of a directory from its zip64 fields, and the start of these fields."""
    _, disk, place, disks = _LOCATOR.unpack(_part(file, locator, _LOCATOR.size))
    if disk or disks != 1 or place + _END64.size != locator:
        raise ValueError("the end of its directory is not where it claims")
    sign, rest, _, _, disk, first, here, count, length, start = _END64.unpack(_part(file, place, _END64.size))
    if sign != b"PK\6\6" or rest != _END64.size - 12 or disk or first or here != count:
        raise ValueError("the end of its directory is damaged")
    return count, length, start, place


def _entries(directory: bytes, count: int) -> Iterator[_Entry]:
    place = 0
    for _ in range(count):
        if place + _ENTRY.size > len(directory):
            raise ValueError("its directory ends too early")
        sign, _, _, flags, method, _, _, checksum, packed, size, name, extra, comment, disk, _, _, offset = (
            _ENTRY.unpack_from(directory, place)
        )
        rest = directory[place + _ENTRY.size : place + _ENTRY.size + name + extra]
        if sign != b"PK\1\2" or len(rest) != name + extra or disk or flags & _ENCRYPTED:
            raise ValueError("its directory is damaged")
        size, packed, offset = _wide(rest[name:], [size, packed, offset])
        if method or packed != size:
            raise ValueError(f"its record {_text(rest[:name])!r} is compressed, which torch does not write")
        yield _Entry(rest[:name], flags, checksum, size, offset)
        place += _ENTRY.size + name + extra + comment
    if place != len(directory):
        raise ValueError("its directory contains more than it claims")


def _wide(extra: bytes, numbers: list[int]) -> list[int]:
    """Replace placeholders by the numbers in the zip64 field."""
    if _FULL not in numbers:
        return numbers
    place = 0
    while place + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, place)
        field = extra[place + 4 : place + 4 + size]
        if kind == 1 and len(field) >= 8 * numbers.count(_FULL):
            wide = iter(struct.unpack_from(f"<{numbers.count(_FULL)}Q", field))
            return [next(wide) if number == _FULL else number for number in numbers]
        place += 4 + size
    raise ValueError("its directory is damaged")


def _located(file: BinaryIO, entry: _Entry, limit: int) -> Record:
    """Locate a record by its local header, which has to agree with the directory."""
    header = _part(file, entry.offset, _HEADER.size)
    sign, _, flags, method, _, _, _, packed, size, name, extra = _HEADER.unpack(header)
    start = entry.offset + _HEADER.size + name + extra
    sizes = (entry.size, _FULL, 0) if flags & _SIZES_BEHIND else (entry.size, _FULL)
    agree = sign == b"PK\3\4" and not method and flags == entry.flags and packed in sizes and size in sizes
    if not agree or _part(file, entry.offset + _HEADER.size, name) != entry.name:
        raise ValueError(f"its directory and the header of {_text(entry.name)!r} disagree")
    if start + entry.size > limit:
        raise ValueError(f"its record {_text(entry.name)!r} is longer than the file")
    folder, slash, rest = _text(entry.name).partition("/")
    if not slash or not folder or not rest:
        raise ValueError(f"its record {_text(entry.name)!r} is in no folder")
    if rest not in _NAMES and rest.partition("/")[0] not in _FOLDERS:
        raise ValueError(f"it contains a record {_text(entry.name)!r}, which `torch.save` does not write")
    return Record(rest, start, entry.size, entry.checksum)


def _text(name: bytes) -> str:
    return name.decode("ascii", "backslashreplace")
