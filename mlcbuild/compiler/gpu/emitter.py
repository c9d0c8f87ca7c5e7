"""Collects the kernels, buffers and launches of a GPU program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from mlcbuild_format.program import (
    PACKED_PRODUCTS,
    SHADER_F16,
    SUBGROUPS,
    Alternative,
    BoundBuffer,
    Buffer,
    CallVariant,
    Expression,
    Kind,
    Launch,
    Shader,
)

from mlcbuild import progress
from mlcbuild.compiler.gpu.shader_text import WGSL, Dialect, lower
from mlcbuild.compiler.gpu.tensorir import KernelBuilder, for_features
from mlcbuild.errors import CompileError

Make = Callable[..., KernelBuilder]
"""Function of (name of a kernel, further arguments) that builds a GPU kernel and returns its finished
KernelBuilder.
"""


_FEATURES = (frozenset({PACKED_PRODUCTS, SUBGROUPS}), frozenset({SUBGROUPS}), frozenset({SHADER_F16}))
"""Sets of names of optional GPU device features for which separate source texts of kernels are built, the
best first; a device runs the text of the first set of which it has all features.
"""


def variants(builder: KernelBuilder) -> list[frozenset[str]]:
    """Returns the sets of optional GPU device features for which a kernel gets source texts of their own, the
    best set first; each is a set of feature names. A device uses the text of a set if it has all of its
    features, else the text without optional features. Devices with only some features of a set hardly exist.
    """
    chosen = list[frozenset[str]]()
    for features in _FEATURES:
        if features <= builder.optional and not any(features <= other for other in chosen):
            chosen.append(features)
    return chosen


@dataclass
class Emitter:
    """A GPU program under construction: its kernels, buffers and functions."""

    dialect: Dialect = WGSL
    shaders: dict[str, Shader] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    """Path of a kernel's file in the library's directory, such as kernels/gemv_3.wgsl -> its source text."""
    buffers: dict[str, Buffer] = field(default_factory=dict)
    functions: dict[str, tuple[CallVariant, ...]] = field(default_factory=dict)
    _names: dict[object, str] = field(default_factory=dict)

    def kernel(self, make: Make, *arguments: object) -> str:
        """Adds the kernel that `make(name, *arguments)` builds to the program, and returns its name, that of
        `make` with a number. Equal arguments give the same kernel, which is built and lowered once. Raises
        CompileError if a scalar of the kernel has a name that WGSL reserves, or if it does not use one of its
        buffers.
        """
        case = (make.__name__, arguments)
        if case not in self._names:
            name = f"{make.__name__}_{len(self._names)}"
            builder = make(name, *arguments)
            shader, text = lower(builder, self.dialect)
            self.texts[shader.file] = text
            if self.dialect is WGSL:
                others = [
                    self._alternative(make, arguments, shader, features) for features in variants(builder)
                ]
                shader = replace(shader, alternatives=tuple(others))
            self.shaders[name], self._names[case] = shader, name
            progress.report(len(self.texts), unit="kernels")
        return self._names[case]

    def _alternative(
        self, make: Make, arguments: tuple[object, ...], plain: Shader, features: frozenset[str]
    ) -> Alternative:
        """Builds a kernel once more, so that it uses the optional GPU device features `features`, and adds
        its source text to the program. Returns the Alternative, which holds the features, the name of the
        text's file, and the bytes of shared memory that it uses. plain: the same kernel without these
        features; make, arguments: the function that built it, and the function's arguments after the name."""
        with for_features(features):
            shader, text = lower(make(plain.entry.removesuffix("_kernel"), *arguments), self.dialect)
        assert replace(shader, shared_bytes=plain.shared_bytes) == plain, "hosts launch both alike"
        names = "_".join(name.partition("_")[0].replace("-", "_") for name in sorted(features))
        file = shader.file.replace(".", f"_{names}.")
        self.texts[file] = text
        return Alternative(tuple(sorted(features)), file, shader.shared_bytes)

    def buffer(self, name: str, size: Expression, kind: Kind = "workspace") -> str:
        self.buffers[name] = Buffer(kind, size)
        return name

    def function(self, name: str, variants: Mapping[int, tuple[Mapping[str, int], list[Launch]]]) -> None:
        """Adds the function `name` to the GPU program, with several variants. variants: a key of any kind ->
        (name of a size -> its maximum in a call, launches of kernels). The keys are not used; a call runs the
        first variant, in the mapping's order, whose maxima are large enough, and fails if there is none."""
        ordered = (CallVariant(dict(sizes), tuple(launches)) for sizes, launches in variants.values())
        self.functions[name] = tuple(ordered)

    def launch(
        self, kernel: str, scalars: Mapping[str, Expression], buffers: Mapping[str, str | BoundBuffer]
    ) -> Launch:
        """Returns a launch of the program's kernel with the name `kernel`. scalars: name of a scalar in the
        kernel -> value; names that the kernel lacks are ignored; buffers: name of a buffer in the kernel ->
        name of the program's buffer to bind, or a part of it.

        Raises CompileError if a scalar is missing, or if the buffer names differ from those that the kernel
        declares.
        """
        shader = self.shaders[kernel]
        names = {binding.name for binding in shader.bindings}
        if set(buffers) != names or not set(shader.scalars) <= set(scalars):
            differing = sorted(set(buffers) ^ names) or sorted(set(shader.scalars) - set(scalars))
            raise CompileError(f"kernel {kernel} is launched with other arguments: {', '.join(differing)}")
        bound = (buffers[binding.name] for binding in shader.bindings)
        uses = tuple(use if isinstance(use, BoundBuffer) else BoundBuffer(use) for use in bound)
        return Launch(kernel, uses, tuple(scalars[name] for name in shader.scalars))
