"""Validates an ELF shared library before the system's loader maps it. Raises ImageError or struct.error for a
library that could not be loaded safely.

The loader maps what the program headers declare, follows the pointers of the dynamic section, and writes
where relocations point, without checks of its own: a pointer that leads outside ends the process by a signal.
Layouts: System V ABI, chapters 4 and 5, and the gABI; only 64-bit little-endian files are accepted."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

MACHINES = {62: "x86_64", 183: "aarch64", 243: "riscv64", 40: "arm"}
_LOAD, _DYNAMIC, _TLS, _EH_FRAME, _STACK = 1, 2, 7, 0x6474E550, 0x6474E551
_RELRO, _PROPERTY = 0x6474E552, 0x6474E553
_MAPPED = {_DYNAMIC, _TLS, _EH_FRAME, _RELRO, _PROPERTY}
"""Types of ELF segments that the loader or the unwinder reads in memory, so that a segment of type PT_LOAD
must contain them."""
_EXECUTE, _WRITE, _READ = 1, 2, 4
_LARGEST_PAGE = 1 << 16
_LARGEST_IMAGE = 1 << 36
"""The largest address space, in bytes, that an ELF library may claim."""
_HEADER, _SEGMENT, _SYMBOL, _RELOCATION = 64, 56, 24, 24

_STRTAB, _SYMTAB, _STRSZ, _SYMENT, _GNU_HASH, _HASH = 5, 6, 10, 11, 0x6FFFFEF5, 4
_SIZED = {7: 8, 23: 2, 36: 35, 25: 27, 26: 28, 32: 33, _STRTAB: _STRSZ}
"""Tag of an ELF library's dynamic section that states a table's address -> tag that states the size of this
table in bytes."""
_TABLES = {7: _RELOCATION, 23: _RELOCATION, 36: 8, 25: 8, 26: 8, 32: 8}
"""Tag of an ELF library's dynamic section that states a table's address -> size in bytes of one entry of this
table."""
_POINTERS = (3, _SYMTAB, _GNU_HASH, _HASH, 12, 13, 0x6FFFFFFE, 0x6FFFFFFC, 0x6FFFFFF0)
_CODE = (12, 13)
_ALIGNED = {7: 8, 23: 8, 25: 8, 26: 8, _SYMTAB: 8, _GNU_HASH: 8, 0x6FFFFFF0: 2, 0x6FFFFFFE: 4}
_NAMES = (1, 14, 15, 29)
_ENTRY_SIZES = {9: _RELOCATION, _SYMENT: _SYMBOL, 37: 8}
_NEEDED, _RELA, _JMPREL, _RELR, _PLTREL, _PLTGOT, _RELACOUNT, _WORD = 1, 7, 23, 36, 20, 3, 0x6FFFFFF9, 64
_TOGETHER = (
    (_RELA, 8, 9),
    (_JMPREL, 2, _PLTREL, _PLTGOT),
    (25, 27),
    (26, 28),
    (_RELR, 35, 37),
    (0x6FFFFFFE, 0x6FFFFFFF, 0x6FFFFFF0),
)
"""Groups of tags of an ELF library's dynamic section. A model's library must have all tags of a group or
none."""
_KNOWN = {tag for tags in _TOGETHER for tag in tags} | {_STRTAB, _SYMTAB, _STRSZ, _SYMENT, _GNU_HASH, _HASH}
_KNOWN |= {12, 13, 14, 15, 24, 29, 30, _RELACOUNT, 0x6FFFFFFB, *range(0x70000000, 0x70000010)}
_KINDS: Mapping[str, tuple[int, frozenset[int], int]] = {
    "x86_64": (8, frozenset({1, 6}), 7),
    "aarch64": (1027, frozenset({257, 1025}), 1026),
    "riscv64": (3, frozenset({2}), 5),
}
"""Architecture -> numbers of the ELF relocation types that are accepted: (type of those that point into the
library itself, types of those that point to symbols, type of those for slots of imported functions). The
first of these slots must be three words of 8 bytes after the address in DT_PLTGOT, except on riscv64, where
its place is not checked."""
_FUNCTION, _ABSOLUTE, _THREAD_LOCAL = 2, 0xFFF1, 6
_BINDINGS = (1, 2)
"""Symbol bindings that the check of an ELF file accepts: global and weak."""


class ImageError(ValueError):
    """The error for an ELF or Mach-O file that breaks a rule. Its message, such as "lacks a relocation",
    completes a sentence that begins with "it"."""


class _Segment(NamedTuple):
    kind: int
    flags: int
    offset: int
    address: int
    in_file: int
    in_memory: int
    alignment: int

    def holds(self, address: int, size: int, in_file: bool) -> bool:
        room = self.in_file if in_file else self.in_memory
        return self.address <= address and address + size <= self.address + room


class Image:
    """The bytes of an ELF library. Its methods raise ImageError for a library that breaks a rule of the
    format, or struct.error where the file is too short."""

    def __init__(self, data: bytes) -> None:
        """Reads an ELF library from its bytes, and checks its program headers (segments) and its dynamic
        section. Raises ImageError for a damaged file, struct.error for one that is too short."""
        self._data = data
        kind, machine = struct.unpack_from("<HH", data, 16)
        if (data[4:6], kind) != (b"\x02\x01", 3):
            raise ImageError("is an ELF file of another kind")
        self.machine = MACHINES.get(machine, f"machine {machine}")
        self._segments = list(self._read_segments())
        self._loads = [segment for segment in self._segments if segment.kind == _LOAD]
        self._check_segments()
        self._dynamic = self._read_dynamic()
        self._check_dynamic()

    def _read_segments(self) -> Iterator[_Segment]:
        size, programs, sections = len(self._data), *struct.unpack_from("<QQ", self._data, 32)
        entry, count, section_size, section_count = struct.unpack_from("<HHHH", self._data, 54)
        if entry != _SEGMENT or not count:
            raise ImageError("is an ELF file of another kind")
        if max(programs + _SEGMENT * count, sections + section_size * section_count) > size:
            raise ImageError("is truncated")
        for i in range(count):
            place = programs + _SEGMENT * i
            kind, flags, offset, address, _, in_file, in_memory, alignment = struct.unpack_from(
                "<IIQQQQQQ", self._data, place
            )
            if kind != _STACK and offset + in_file > size:
                raise ImageError("is truncated")
            yield _Segment(kind, flags, offset, address, in_file, in_memory, alignment)

    def _check_segments(self) -> None:
        end = 0
        if not self._loads:
            raise ImageError("has no segment to load")
        for load in self._loads:
            page = max(load.alignment, 1)
            if page & (page - 1) or (load.address - load.offset) % page:
                raise ImageError("has a segment that is not aligned")
            if load.in_memory < load.in_file or load.address < end or not load.flags & _READ:
                raise ImageError("has segments that overlap, or cannot be read")
            end = load.address + load.in_memory
        if end > _LARGEST_IMAGE:
            raise ImageError(f"claims {end} bytes of memory")
        for segment in self._segments:
            if segment.kind in _MAPPED and segment.in_memory and not self._maps(segment):
                raise ImageError("has a program header that points outside of what is loaded")

    def _maps(self, segment: _Segment) -> bool:
        if segment.kind == _RELRO:  # The section may end with the page, after the bytes of the file.
            return any(
                load.flags & _WRITE
                and load.address <= segment.address
                and segment.address + segment.in_memory <= _page_end(load.address + load.in_memory)
                for load in self._loads
            )
        for load in self._loads:
            if load.holds(segment.address, segment.in_file, in_file=True):
                return segment.offset - load.offset == segment.address - load.address
        return False

    def _read_dynamic(self) -> list[tuple[int, int]]:
        segments = [segment for segment in self._segments if segment.kind == _DYNAMIC]
        if len(segments) != 1:
            raise ImageError("has no dynamic section, or several")
        entries: list[tuple[int, int]] = []
        start, size = segments[0].offset, segments[0].in_file
        data = self._data[start : start + size]
        for tag, value in struct.iter_unpack("<QQ", data[: len(data) // 16 * 16]):
            if not tag:
                return entries
            entries.append((tag, value))
        raise ImageError("has a dynamic section without an end")

    def _check_dynamic(self) -> None:
        self._values: Mapping[int, int] = dict(self._dynamic)
        if not {_STRTAB, _SYMTAB, _STRSZ} <= self._values.keys():
            raise ImageError("has no symbols")
        for tag, value in self._dynamic:
            fault = (
                (tag in _POINTERS and not self._is_loaded(value, 1, _EXECUTE if tag in _CODE else _READ))
                or (tag in _SIZED and not self._is_loaded(value, self._size(tag), _READ))
                or (tag in _TABLES and self._size(tag) % _TABLES[tag])
                or (tag in _ALIGNED and value % _ALIGNED[tag])
                or (tag in _NAMES and value >= self._values[_STRSZ])
                or (tag in _ENTRY_SIZES and value != _ENTRY_SIZES[tag])
            )
            if fault:
                raise ImageError(f"has a dynamic section whose entry {tag:#x} is wrong")

    def _size(self, tag: int) -> int:
        """Returns the size in bytes of an ELF table. tag: the tag in the dynamic section that states the
        table's address. Returns a number larger than any file if the section does not state the size."""
        return self._values.get(_SIZED[tag], 1 << 62)

    def _is_loaded(self, address: int, size: int, flags: int, in_file: bool = True) -> bool:
        return any(load.flags & flags and load.holds(address, size, in_file) for load in self._loads)

    def _at(self, address: int, size: int) -> bytes:
        for load in self._loads:
            if load.holds(address, size, in_file=True):
                start = load.offset + address - load.address
                return self._data[start : start + size]
        raise ImageError("points outside of what is loaded")

    def exports(self) -> frozenset[bytes]:
        """Returns the names of all symbols that the ELF library defines, except absolute and thread-local
        ones. Raises ImageError if its symbols or relocations are damaged, or it has a part that no model's
        library has; struct.error where a table is too short.
        """
        self._check_model()
        names = self._names()
        table = self._at(self._values[_SYMTAB], _SYMBOL * len(names))
        exported = set()
        for name, row in zip(names, struct.iter_unpack("<IBBHQQ", table), strict=True):
            _, info, _, section, value, size = row
            if name and info >> 4 not in _BINDINGS:
                raise ImageError("has a symbol of another kind")
            if not section or section == _ABSOLUTE or info & 15 == _THREAD_LOCAL:
                continue
            flags = _EXECUTE if info & 15 == _FUNCTION else _READ
            if not self._is_loaded(value, size, flags, in_file=False):
                raise ImageError("has a symbol outside of what is loaded")
            exported.add(name)
        self._check_relocations(len(names))
        return frozenset(exported)

    def _check_model(self) -> None:
        """Raises ImageError for contents that other ELF files may have but a model's library never has:
        unknown or repeated entries in the dynamic section, only a part of the entries that belong together
        (_TOGETHER), relocations of imported functions without addends (DT_REL), or a segment that can be
        written and executed."""
        tags = [tag for tag, _ in self._dynamic if tag != _NEEDED]
        strange = set(tags) - _KNOWN
        if strange or len(set(tags)) < len(tags):
            raise ImageError("has a dynamic section with unknown or repeated entries")
        if any({*pair} & {*tags} and not {*pair} <= {*tags} for pair in _TOGETHER):
            raise ImageError("has a dynamic section that lacks an entry")
        if self._values.get(_PLTREL, _RELA) != _RELA:
            raise ImageError("has relocations of another kind")
        if any(load.flags & _WRITE and load.flags & _EXECUTE for load in self._loads):
            raise ImageError("has a segment that can be written and run")

    def _names(self) -> list[bytes]:
        """Returns the name of every symbol of the ELF library, in the order of its symbol table. Raises
        ImageError if it has no hash table of symbols, or a GNU one that does not find each exported symbol.
        """
        if _GNU_HASH not in self._values:
            if _HASH not in self._values:
                raise ImageError("has no table of symbols")
            _, chains = self._words(self._values[_HASH], 2)
            return [self._name(index) for index in range(chains)]
        place = self._values[_GNU_HASH]
        buckets, first, words, shift = self._words(place, 4)
        if not buckets or not words or words & (words - 1) or shift > _WORD:
            raise ImageError("has a table of symbols that is wrong")
        bloom = struct.unpack(f"<{words}Q", self._at(place + 16, 8 * words))
        starts = self._words(place + 16 + 8 * words, buckets)
        chain = place + 16 + 8 * words + 4 * buckets
        names = [self._name(index) for index in range(first)]
        for bucket, start in enumerate(starts):
            index = start
            while start:
                if index != len(names):
                    raise ImageError("has a table of symbols that is wrong")
                names.append(self._name(index))
                hashed = _gnu_hash(names[-1])
                (entry,) = self._words(chain + 4 * (index - first), 1)
                bits = bloom[hashed // _WORD % words]
                hit = bits >> hashed % _WORD & bits >> (hashed >> shift) % _WORD & 1
                if entry | 1 != hashed | 1 or hashed % buckets != bucket or not hit:
                    raise ImageError("has a table of symbols that is wrong")
                index += 1
                if entry & 1:
                    break
        return names

    def _name(self, index: int) -> bytes:
        (place,) = self._words(self._values[_SYMTAB] + _SYMBOL * index, 1)
        text = self._at(self._values[_STRTAB], self._values[_STRSZ])
        end = text.find(b"\0", place)
        if end < 0:
            raise ImageError("has a symbol without a name")
        return text[place:end]

    def _words(self, address: int, count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}I", self._at(address, 4 * count))

    def _check_relocations(self, symbols: int) -> None:
        relative, pointers, function = _KINDS.get(self.machine, (0, frozenset(), 0))
        called, before = self._called(), self._values.get(_RELACOUNT, 0)
        for place, info, addend in self._rows(_RELA, 8):
            kind, symbol, before = info & 0xFFFFFFFF, info >> 32, before - 1
            if kind == relative:
                flags = _EXECUTE if place in called else _READ
                right = not symbol and addend >= 0 and self._is_loaded(addend, 0, flags, in_file=False)
                called.discard(place)
            else:
                right = kind in pointers and 0 < symbol < symbols and before < 0
            self._check_row(place, right)
        for i, (place, info, _) in enumerate(self._rows(_JMPREL, 2)):
            right = info & 0xFFFFFFFF == function and 0 < info >> 32 < symbols
            slots = self._values[_PLTGOT] + 24
            self._check_row(place, right and (i > 0 or place == slots or self.machine == "riscv64"))
        if before > 0 or (called and _RELR not in self._values):
            raise ImageError("lacks a relocation")

    def _called(self) -> set[int]:
        """Returns the addresses at which the ELF library stores pointers to functions that the loader calls
        when it loads or unloads the library. Relocations write these pointers."""
        tables = [
            (self._values[at], self._values[size]) for at, size in ((25, 27), (26, 28)) if at in self._values
        ]
        return {place for start, size in tables for place in range(start, start + size, 8)}

    def _rows(self, address: int, size: int) -> Iterator[tuple[int, ...]]:
        if address not in self._values:
            return iter(())
        return struct.iter_unpack("<QQq", self._at(self._values[address], self._values[size]))

    def _check_row(self, place: int, right: bool) -> None:
        if not right or not self._is_loaded(place, 8, _WRITE, in_file=False):
            raise ImageError("has a relocation that is wrong")


def _gnu_hash(name: bytes) -> int:
    hashed = 5381
    for byte in name:
        hashed = (hashed * 33 + byte) & 0xFFFFFFFF
    return hashed


def _page_end(address: int) -> int:
    return -(-address // _LARGEST_PAGE) * _LARGEST_PAGE
