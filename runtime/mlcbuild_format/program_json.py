"""Reads and writes program.json, the file of a GPU program; reading is strict. See program.py for the meaning
of its fields.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar, get_args

from mlcbuild_format.fields import FieldError, Fields, Json, describe, is_integer, plain
from mlcbuild_format.program import (
    FEATURES,
    FORMAT,
    ITEM_BYTES,
    MAX_INT32,
    OPERATIONS,
    WORD,
    Alternative,
    Binding,
    BoundBuffer,
    Buffer,
    CallVariant,
    Expression,
    Kind,
    Launch,
    Program,
    RopeTable,
    Section,
    Shader,
    Sizes,
    evaluate,
)
from mlcbuild_format.signature import Tensor

Item = TypeVar("Item")

MAX_BYTES = 1 << 42
_MAX_DEPTH = 6
_MAX_LAUNCHES = 200_000
"""Maximum number of launches in all variants of all functions of a GPU program together."""
_MAX_TABLE = 1 << 16
_MAX_SHARED = 1 << 20
_MAX_UNIFORMS = 63
"""Maximum number of int32 scalars that a kernel's code reads: with one word for the grid, they fill the 256
bytes in which hosts keep the uniforms of a launch."""
_NAME = r"[A-Za-z_][A-Za-z0-9_.:-]{0,199}"
_FILE = r"kernels/[A-Za-z0-9_]{1,100}\.[a-z]{1,8}"


def parse(document: Json) -> Program:
    """Returns the GPU program that a decoded JSON document describes. Raises FieldError if the document is
    not a valid program. It does not check sizes against buffers and devices, as program.check does."""
    top = Fields(document)
    if top.value.get("format") != FORMAT:
        raise FieldError(f"'format' must be '{FORMAT}', found {describe(top.value.get('format'))}")
    top.only("format", *Program.__dataclass_fields__)
    sizes = _sizes(top.fields("sizes"))
    program = Program(
        signature=top.text("signature", "[0-9a-f]{64}"),
        params=tuple(_params(top)),
        sizes=sizes,
        kernels=_named(top, "kernels", _kernel),
        buffers=_named(top, "buffers", lambda fields: _buffer(fields, sizes)),
        inputs=_named(top, "inputs", lambda fields: _section(fields, sizes)),
        ropes=_named(top, "ropes", _rope),
        functions={name: _variants(name, value, sizes) for name, value in top.object("functions").items()},
    )
    _cross_check(program)
    return program


def _sizes(fields: Fields) -> dict[str, int]:
    for name in fields.value:
        _check_name(name, fields.name)
    return {name: fields.integer(name, 0, MAX_INT32) for name in fields.value}


def _check_name(name: str, where: str) -> None:
    Fields({"name": name}, where).text("name", _NAME)


def _params(top: Fields) -> Iterator[Tensor]:
    rows = top.value.get("params")
    if not isinstance(rows, list):
        raise FieldError("'params' must be a list")
    for row in rows:
        match row:
            case [str(name), list(shape), str(dtype), str(layout)] if dtype in ITEM_BYTES:
                sizes = [size for size in shape if is_integer(size) and 0 < size <= MAX_INT32]
                if len(sizes) == len(shape) <= 4 and math.prod(sizes) <= MAX_BYTES:
                    _check_name(name, "params")
                    yield name, sizes, dtype, layout
                    continue
        raise FieldError(f"'params' holds {describe(row)}, not [name, shape, dtype, layout]")


def _named(top: Fields, key: str, read: Callable[[Fields], Item]) -> dict[str, Item]:
    fields = top.fields(key)
    for name in fields.value:
        _check_name(name, key)
    return {name: read(fields.fields(name)) for name in fields.value}


def _kernel(fields: Fields) -> Shader:
    fields.only(*Shader.__dataclass_fields__)
    scalars = fields.texts("scalars", _NAME)
    allowed = dict.fromkeys(scalars, MAX_INT32)
    grid = _list(fields, "grid")
    if len(grid) != 2:
        raise FieldError(f"{fields.name} has a grid of {len(grid)} dimensions, not 2")
    x, y = (_expression(extent, allowed, fields.name) for extent in grid)
    bindings = [_binding(entry, allowed, fields.name) for entry in _list(fields, "bindings")]
    for names in (scalars, [binding.name for binding in bindings]):
        if len(set(names)) != len(names):
            raise FieldError(f"{fields.name} has two scalars or two bindings of one name")
    return Shader(
        file=fields.text("file", _FILE),
        entry=fields.text("entry", "[A-Za-z_][A-Za-z0-9_]{0,199}"),
        threads=fields.integer("threads", 1, 1024),
        shared_bytes=fields.integer("shared_bytes", 0, _MAX_SHARED),
        bindings=tuple(bindings),
        scalars=scalars,
        uniforms=fields.integer("uniforms", 0, min(len(scalars), _MAX_UNIFORMS)),
        grid=(x, y),
        alternatives=tuple(_alternative(entry, fields.name) for entry in _list(fields, "alternatives")),
    )


def _alternative(entry: Json, where: str) -> Alternative:
    fields = Fields(entry, f"{where.strip(chr(39))}.alternatives").only(*Alternative.__dataclass_fields__)
    features = fields.texts("features", _NAME)
    unknown = sorted(set(features) - set(FEATURES))
    if unknown or not features:
        first = describe(unknown[0]) if unknown else "none"
        raise FieldError(f"{fields.name} needs a feature of {', '.join(FEATURES)}, found {first}")
    shared = fields.integer("shared_bytes", 0, _MAX_SHARED)
    return Alternative(features, fields.text("file", _FILE), shared)


def _binding(entry: Json, allowed: Sizes, where: str) -> Binding:
    fields = Fields(entry, f"{where}.bindings").only(*Binding.__dataclass_fields__)
    written = fields.value.get("written")
    if not isinstance(written, bool):
        raise FieldError(f"{where}: 'written' must be true or false, found {describe(written)}")
    return Binding(fields.text("name", _NAME), written, _expression(fields.value.get("size"), allowed, where))


def _buffer(fields: Fields, sizes: Sizes) -> Buffer:
    fields.only(*Buffer.__dataclass_fields__)
    kind = fields.value.get("kind")
    for allowed in get_args(Kind):
        if kind == allowed:
            return Buffer(allowed, _expression(fields.value.get("size"), sizes, fields.name))
    raise FieldError(f"{fields.name} is of kind {describe(kind)}, not {', '.join(get_args(Kind))}")


def _section(fields: Fields, sizes: Sizes) -> Section:
    fields.only(*Section.__dataclass_fields__)
    size = _expression(fields.value.get("size"), sizes, fields.name)
    return Section(fields.integer("start", 0, MAX_INT32), size)


def _rope(fields: Fields) -> RopeTable:
    fields.only(*RopeTable.__dataclass_fields__)
    values = _list(fields, "inv_freq")
    numbers = [
        float(value)
        for value in values
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1e9
    ]
    factor = fields.number("factor", 0, 1e9)
    if not 0 < len(numbers) == len(values) <= _MAX_TABLE or factor is None:
        raise FieldError(f"{fields.name} must have numbers from 0 to 1e9 as 'inv_freq' and 'factor'")
    return RopeTable(fields.integer("rows", 1, 1 << 24), tuple(numbers), factor)


def _variants(name: str, value: Json, sizes: Sizes) -> tuple[CallVariant, ...]:
    _check_name(name, "functions")
    where = f"'functions.{name}'"
    if not isinstance(value, list) or not value:
        raise FieldError(f"{where} must be a list of variants, found {describe(value)}")
    variants = []
    for entry in value:
        fields = Fields(entry, where).only(*CallVariant.__dataclass_fields__)
        largest_sizes = _sizes(fields.fields("sizes"))
        for size, largest in largest_sizes.items():
            if largest > sizes.get(size, 0):
                raise FieldError(f"{where}: size '{size}' may be {largest}, more than the program has")
        allowed = {**largest_sizes, "pages": 1}
        launches = (_launch(launch, allowed, where) for launch in _list(fields, "launches"))
        variants.append(CallVariant(largest_sizes, tuple(launches)))
    return tuple(variants)


def _launch(entry: Json, sizes: Sizes, where: str) -> Launch:
    match entry:
        case [str(kernel), list(uses), list(scalars)]:
            values = tuple(_expression(scalar, sizes, where) for scalar in scalars)
            return Launch(kernel, tuple(_use(use, where) for use in uses), values)
    raise FieldError(f"{where} holds {describe(entry)}, not [kernel, buffers, scalars]")


def _use(entry: Json, where: str) -> BoundBuffer:
    match entry:
        case str(name):
            return BoundBuffer(name)
        case [str(name), int(offset)] if is_integer(offset) and 0 <= offset <= MAX_BYTES:
            return BoundBuffer(name, offset)
    raise FieldError(f"{where} binds {describe(entry)}, not a name or [name, offset]")


def _expression(value: Json, allowed: Sizes, where: str, depth: int = 0) -> Expression:
    """Returns an expression over the sizes of a GPU program's call, or over a kernel's scalars, parsed from
    JSON: an integer from 0 to 2**42, a name, or [operation, left, right], nested at most 6 deep. Raises
    FieldError for anything else, and for a "div" by anything but a whole number above 0.

    allowed: names that it may contain; where: its place, for messages; depth: number of enclosing
    expressions.
    """
    if is_integer(value) and 0 <= value <= MAX_BYTES:
        return value
    if isinstance(value, str) and value in allowed:
        return value
    if depth < _MAX_DEPTH and isinstance(value, list) and len(value) == 3:
        name, left, right = value
        if isinstance(name, str) and name in OPERATIONS:
            if name == "div" and not (is_integer(right) and right > 0):
                raise FieldError(f"{where} divides by {describe(right)}, not by a whole number above 0")
            operands = (_expression(operand, allowed, where, depth + 1) for operand in (left, right))
            return (name, *operands)  # type: ignore[return-value]
    raise FieldError(f"{where} has {describe(value)} where an expression must stand")


def _list(fields: Fields, key: str) -> list[Json]:
    value = fields.value.get(key)
    if not isinstance(value, list):
        raise FieldError(f"{fields.name}: '{key}' must be a list, found {describe(value)}")
    return value


def _cross_check(program: Program) -> None:
    """Raises FieldError unless all names in a GPU program are defined once, its sizes include "pages",
    launches have as many buffers and scalars as their kernels, inputs lie within their one buffer, tables of
    rotary embeddings fill theirs, and there are at most 200,000 launches."""
    params = {name for name, *_ in program.params}
    if len(params) != len(program.params) or params & set(program.buffers):
        raise FieldError("'params' and 'buffers' have two entries of one name")
    if "pages" not in program.sizes:
        raise FieldError("'sizes.pages' is missing")
    ropes = {name for name, buffer in program.buffers.items() if buffer.kind == "rope"}
    inputs = [name for name, buffer in program.buffers.items() if buffer.kind == "inputs"]
    if set(program.ropes) != ropes or len(inputs) != 1:
        raise FieldError(
            "'buffers' must have one entry of kind inputs, and one of kind rope for each of 'ropes'"
        )
    for name, rope in program.ropes.items():
        _check_whole(program, name, rope.rows * 2 * len(rope.inv_freq) * WORD)
    for name, section in program.inputs.items():
        end = (section.start + evaluate(section.size, program.sizes)) * WORD
        if end > evaluate(program.buffers[inputs[0]].size, program.sizes):
            raise FieldError(f"'inputs.{name}' ends at byte {end}, beyond the buffer '{inputs[0]}'")
    variants = [variant for variants in program.functions.values() for variant in variants]
    if sum(len(variant.launches) for variant in variants) > _MAX_LAUNCHES:
        raise FieldError(f"'functions' have more than {_MAX_LAUNCHES} launches")
    for launch in (launch for variant in variants for launch in variant.launches):
        _check_names(program, launch, params)


def _check_whole(program: Program, name: str, size: int) -> None:
    if evaluate(program.buffers[name].size, program.sizes) != size:
        raise FieldError(f"'buffers.{name}' must have {size} bytes")


def _check_names(program: Program, launch: Launch, params: set[str]) -> None:
    if launch.kernel not in program.kernels:
        raise FieldError(f"a launch names the kernel {describe(launch.kernel)}, which 'kernels' lacks")
    kernel = program.kernels[launch.kernel]
    counts = (len(launch.uses), len(launch.scalars))
    if counts != (len(kernel.bindings), len(kernel.scalars)):
        raise FieldError(
            f"a launch of '{launch.kernel}' has {counts[0]} buffers and {counts[1]} scalars, and the kernel"
            f" {len(kernel.bindings)} and {len(kernel.scalars)}"
        )
    for use in launch.uses:
        if use.name not in params and use.name not in program.buffers:
            raise FieldError(f"a launch binds {describe(use.name)}, which is no buffer and no parameter")


def to_json(program: Program) -> dict[str, Json]:
    """Returns a GPU program as a decoded JSON document (a dict); `parse` is the inverse."""
    functions = {
        name: [
            {"sizes": variant.sizes, "launches": list(map(_launch_json, variant.launches))}
            for variant in variants
        ]
        for name, variants in program.functions.items()
    }
    document = {name: _fields(getattr(program, name)) for name in Program.__dataclass_fields__}
    return {**document, "format": FORMAT, "functions": plain(functions)}


def _fields(value: object) -> Json:
    """Returns a value as JSON: a dataclass as an object with its fields' names as keys, containers item by
    item."""
    if isinstance(value, Mapping):
        return {str(key): _fields(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_fields(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: _fields(getattr(value, name)) for name in value.__dataclass_fields__}
    return plain(value)


def _launch_json(launch: Launch) -> list[object]:
    uses = [[use.name, use.offset] if use.offset else use.name for use in launch.uses]
    return [launch.kernel, uses, list(launch.scalars)]


def to_bytes(program: Program) -> bytes:
    """Returns the content of program.json: the same bytes for the same GPU program."""
    text = json.dumps(to_json(program), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode() + b"\n"
