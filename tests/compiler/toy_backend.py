"""A backend for tests as another package would add it: its `Ops` count their calls and compute nothing, and
its action does not need TVM.

Run as a program, it builds the functions of two libraries, with a decode loop and without, and prints for
each the calls, the functions, and the modules of other backends that were imported.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlcbuild_format.abi import PAGE

from mlcbuild.models import Attention, Dense, LayerSpec, ModelConfig, Norms, RmsNorm, Rope
from mlcbuild.quant import Storage
from mlcbuild.targets.target import Target
from tests.schemes import SCHEMES

if TYPE_CHECKING:
    from mlcbuild_format.limits import Limits

    from mlcbuild.compiler.program.ops import Layer, Ops, ResidualRows

NORM = RmsNorm(1e-6)
PLAIN = LayerSpec(Attention(2, 1, 4, 0.5), Dense(12), Norms(NORM))
WINDOW = LayerSpec(Attention(2, 1, 4, 0.5, window=7), Dense(12), Norms(NORM))
WIDE = LayerSpec(Attention(2, 1, 4, 0.5, rope=1), Dense(20), Norms(NORM))
CONFIG = ModelConfig(
    family="llama",
    vocab_size=50,
    hidden_size=8,
    max_position=64,
    layers=(PLAIN, PLAIN, WINDOW, WIDE),
    ropes=(Rope(4, (1.0, 0.5)), Rope(2, (1.0,))),
    norm=NORM,
)


def compile_library(params: Mapping[str, Any], inputs: Mapping[str, Path], out: Path) -> None:
    """Action for tests: writes a text file in place of a library."""
    (out / "model.toy").write_text(json.dumps(params["target"]))


def tools(target: Target) -> dict[str, str]:
    return {"toy": f"1 for {target.device}"}


@dataclass(frozen=True)
class ToyCache:
    dtype: str = "float32"
    page_bytes: int = 64

    def cache_shape(self, pages: Any) -> tuple[Any, ...]:
        return (pages, PAGE)


@dataclass(frozen=True)
class ToyOps:
    config: ModelConfig
    scheme: Storage
    decode_loop: bool = True
    selects_rows = False
    cache = ToyCache()
    plan = lower = kernels = ()
    calls: Counter[str] = field(default_factory=Counter)

    @property
    def target(self) -> Any:
        raise AssertionError("only code generation asks for it")

    def scratch(self) -> Mapping[str, tuple[int, str]]:
        return {"half": (self.config.hidden_size, "float16")}

    def embed(self, tokens: Any, weights: Any) -> Any:
        return self._made("embed", tokens.shape[0], self.config.hidden_size)

    def add_positions(self, x: Any, positions: Any, table: Any) -> Any:
        return self._made("add_positions", *x.shape)

    def angles(self, positions: Any, inv_freq: Any, factor: float, spec: Rope) -> Any:
        return self._made("angles", positions.shape[0], 2 * int(inv_freq.shape[0]))

    def copy(self, x: Any) -> Any:
        return self._made("copy", *x.shape)

    def attention(self, rows: ResidualRows, layer: Layer, selected: Any = None) -> ResidualRows:
        from mlcbuild.compiler.program.ops import ResidualRows

        assert {"attn.qkv.weight", "attn.o.weight"} < set(layer.weights) and selected is None
        assert str(rows.scratch["half"].dtype) == "float16"
        return ResidualRows(self._made("attention", *rows.x.shape), rows.scratch)

    def feed_forward(self, rows: ResidualRows, layer: Layer) -> Any:
        return self._made("feed_forward", *rows.x.shape)

    def last_norm(self, x: Any, weights: Any) -> Any:
        return self._made("last_norm", *x.shape)

    def select_rows(self, x: Any, rows: Any, weights: Any) -> Any:
        return self._made("select_rows", rows.shape[0], x.shape[1])

    def logits(self, x: Any, weights: Any) -> Any:
        return self._made("logits", x.shape[0], self.config.vocab_size)

    def mask(self, logits: Any, masks: Any) -> Any:
        return self._made("mask", *logits.shape)

    def sample(self, logits: Any, params: Any, out: Any) -> Any:
        return self._made("sample", *logits.shape)

    def next_inputs(self, inputs: Mapping[str, Any]) -> None:
        self.calls["next_inputs"] += 1

    def kernel_names(self) -> tuple[dict[str, str], dict[str, str]]:
        return {"all": "toy"}, {}

    def workspace(self, limits: Limits, mod: Any) -> int:
        return 0

    def _made(self, name: str, *shape: Any) -> Any:
        """Counts one call of the operation `name` of a test backend, and emits a float32 tensor of zeros with
        the dimensions `shape` as its result."""
        from tvm import relax
        from tvm.relax.frontend.nn import Tensor

        self.calls[name] += 1
        zeros = relax.op.zeros(relax.ShapeExpr(list(shape)), "float32")
        return Tensor(_expr=relax.BlockBuilder.current().emit(zeros))


def main() -> None:
    sys.stdout.write(json.dumps([built(decode_loop=True), built(decode_loop=False)]) + "\n")


def built(*, decode_loop: bool) -> dict[str, object]:
    """Builds the functions of a library, with or without a decode loop. Returns the calls of operations,
    operation -> number, the names of the functions, and the modules of CPUs that are loaded."""
    from mlcbuild_format.limits import Limits

    from mlcbuild.compiler.program import functions
    from mlcbuild.compiler.program.decoder import Decoder

    toy = ToyOps(CONFIG, SCHEMES["q4f16_1"], decode_loop=decode_loop)
    ops: Ops = toy
    mod = functions.build(Decoder(ops, Limits(64, 16, 2)))
    public = [
        str(name.name_hint)
        for name, function in mod.functions.items()
        if function.attrs and "global_symbol" in function.attrs
    ]
    loaded = [name for name in sys.modules if name.startswith("mlcbuild.compiler.cpu")]
    return {"calls": toy.calls, "functions": sorted(public), "loaded": loaded}


if __name__ == "__main__":
    main()
