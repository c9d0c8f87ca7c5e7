"""A real bundle with a trivial model, for tests of everything except the kernels.

The most likely token after tokens t_0 .. t_p is sum(t_j * (j % 7 + 1)) mod VOCAB. It depends on every token
of the sequence and on its position, so that a wrong page, slot or length changes the text. Run as a program
(`toy.py DIRECTORY`), the file writes the bundle; only that part needs the compiler.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mlcbuild_format import abi
from mlcbuild_format.fields import Json

VOCAB = 260
"""Size of the toy's vocabulary: 256 bytes, <s>, </s>, <|user|>, <|assistant|>."""
BOS, EOS = 256, 257
NAME = "toy-q0f32-host"
WAYS = len(abi.SAMPLING_COLUMNS)
LIMITS = {"context_window": 256, "prefill_chunk": 32, "max_batch": 4, "page_size": 16}
CONFIG: dict[str, Json] = {"family": "toy", "vocab_size": VOCAB, "norm_eps": "1e-05"}
SCHEME: dict[str, Json] = {"name": "q0f32"}
TARGET: dict[str, Json] = {
    "triple": "arm64-apple-macosx11.0.0"
    if sys.platform == "darwin"
    else f"{platform.machine()}-unknown-linux-gnu",
    "cpu": {"darwin": "apple-m1"}.get(
        sys.platform, "x86-64-v2" if platform.machine() == "x86_64" else "generic"
    ),
    "features": [],
    "device": "cpu",
    "output": "shared",
}
TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}
    {{- '<|' + message.role + '|>' + message.content + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


reference: Callable[[Sequence[int], int], list[int]] | None = None
"""Function with the parameters of `expected` (prompt, number of tokens) that returns a real model's greedy
answer. It is set where tests run with that model in place of the toy model; else None."""


def expected(prompt: Sequence[int], count: int) -> list[int]:
    """Returns `count` tokens that greedy decoding of the toy model gives after a prompt; end-of-sequence
    tokens do not end it."""
    if reference is not None:
        return reference(prompt, count)
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum(t * (j % 7 + 1) for j, t in enumerate(tokens)) % VOCAB)
    return tokens[len(prompt) :]


def write(out: Path, device: str = "cpu") -> None:
    """Writes the toy bundle to the directory `out`.

    device: "cpu", for which a library is compiled; "numpy", for the executor in numpy_executor.py; or
    "webgpu", for which gpu_toy.py has written the program before.
    """
    from mlcbuild_format import bundle

    params = [["table", [VOCAB, 4], "float32", "plain"]]
    digest = bundle.signature([("table", (VOCAB, 4), "float32", "plain")])
    metadata = {
        "format": "mlcbuild-library/2",
        "config": CONFIG,
        "scheme": SCHEME,
        "target": TARGET,
        "limits": LIMITS,
        "params": params,
        "signature": digest,
    }
    out.mkdir(parents=True, exist_ok=True)
    library, target = "model.so", TARGET
    if device == "cpu":
        export(out / library, json.dumps(metadata))
    else:
        library = "program.json" if device == "webgpu" else "model.json"
        target = {**TARGET, "device": device, "output": "program"}
        if device != "webgpu":
            (out / library).write_text(json.dumps({"vocab_size": VOCAB}))
    write_weights(out / "weights-00001-of-00001.safetensors", digest)
    write_tokenizer(out)
    names = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    manifest = bundle.Manifest(
        name=NAME,
        model=bundle.Model("toy", "toy", CONFIG),
        scheme=SCHEME,
        target=target,
        limits=bundle.Limits(**LIMITS),
        library=library,
        weights=("weights-00001-of-00001.safetensors",),
        signature=digest,
        files={name: describe(out / name) for name in names},
        memory=bundle.Memory(VOCAB * 16, 64 * 128, 0, VOCAB * 16 + 64 * 128),
        serving=bundle.Serving(bos_token_id=BOS, eos_token_ids=(EOS,), temperature=0.0),
        tools={"apache-tvm": "0.27.0.post1"},
    )
    (out / "bundle.json").write_bytes(manifest.to_bytes())


def describe(path: Path) -> Any:
    """Returns the entry for a file in a bundle's manifest: its BLAKE3 digest and its size in bytes."""
    from blake3 import blake3
    from mlcbuild_format.bundle import File

    return File(blake3(path.read_bytes()).hexdigest(), path.stat().st_size)


def write_weights(path: Path, digest: str) -> None:
    table = np.zeros((VOCAB, 4), np.float32)
    table[:, 0] = np.arange(VOCAB)
    metadata = {"format": "mlcbuild-weights/1", "signature": digest, "scheme": "q0f32"}
    entry = {"dtype": "F32", "shape": [VOCAB, 4], "data_offsets": [0, table.nbytes]}
    header = json.dumps({"__metadata__": metadata, "table": entry}).encode()
    header += b" " * (-(len(header) + 8) % 64)
    path.write_bytes(len(header).to_bytes(8, "little") + header + table.tobytes())


def write_tokenizer(out: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    tokenizer.save(str(out / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    (out / "tokenizer_config.json").write_text(json.dumps(config))


def export(out: Path, metadata: str) -> None:
    """Compiles the toy model's library for this machine's CPU and writes it to the file `out`. metadata: JSON
    text that the library returns about itself."""
    import tvm
    from tvm import relax

    from mlcbuild.compiler.cpu.isa import ISAS
    from mlcbuild.compiler.cpu.kernels.logit_mask import masked
    from mlcbuild.compiler.cpu.kernels.sampling import sample
    from mlcbuild.compiler.cpu.ops import emit_next_inputs
    from mlcbuild.compiler.program.decode_loop import emit_steps

    builder = relax.BlockBuilder()
    lookup = builder.add_func(_lookup(), "lookup")
    attend = builder.add_func(_attend(), "attend")
    masking = builder.add_func(masked(ISAS[-1]), "masked")
    sampling = builder.add_func(sample(ISAS[-1]), "sample")
    _emit_sample_tokens(builder, masking, sampling)
    step, _ = (
        _emit_step(builder, (lookup, attend, masking, sampling), name) for name in ("step", "step_prefill")
    )
    emit_steps(builder, (step, emit_next_inputs), _variables, {})
    count = tvm.tirx.Var("count", "int64")
    shape = relax.Var("shape", relax.ShapeType([count]))
    with builder.function("create_paged_kv_cache", [shape]):
        pages = relax.op.zeros(relax.ShapeExpr([1, count, 2, 1, 16]), "float32")
        builder.emit_func_output(builder.emit(pages))
    with builder.function("_metadata", []):
        builder.emit_func_output(builder.normalize(tvm.ir.StringImm(metadata)))
    target = tvm.target.Target({"kind": "llvm", "mtriple": TARGET["triple"], "mcpu": TARGET["cpu"]})
    with target:
        tvm.compile(builder.get(), target=target).export_library(str(out))


def _params() -> Any:
    from tvm import relax

    return relax.Var("params", relax.TupleType([relax.TensorType((VOCAB, 4), "float32")]))


def _var(name: str, *shape: object, dtype: str = "int32") -> Any:
    from tvm import relax

    return relax.Var(name, relax.TensorType(shape, dtype))


def _sequences(n: Any, b: Any, c: Any) -> list[Any]:
    import tvm

    p, t = (tvm.tirx.Var(letter, "int64") for letter in "pt")
    return [
        _var("pages", 1, t, 2, 1, 16, dtype="float32"),
        *(_var("positions", n), _var("slots", n), _var("indptr", c)),
        *(_var("page_indptr", c), _var("page_table", p), _var("lengths", b)),
    ]


def _variables(function: abi.Function) -> dict[str, Any]:
    """Returns argument name -> TVM variable, in order, for a function of a compiled library, if each sequence
    has exactly one new token: then the numbers of tokens and of sequences are the same variable."""
    import tvm

    n = tvm.tirx.Var("n", "int64")
    sizes: dict[Any, Any] = {"n": n, "b": n, "b+1": n + 1}
    by_name = {"pages": _sequences(n, n, n + 1)[0], "params": _params()}
    for argument in function.arguments:
        shape = [
            size if isinstance(size, int) else sizes.setdefault(size, tvm.tirx.Var(size, "int64"))
            for size in argument.shape
        ]
        if argument.dtype is not None:
            by_name[argument.name] = _var(argument.name, *shape, dtype=argument.dtype)
    return {name: by_name[name] for name in function.names}


def _emit_step(builder: Any, kernels: tuple[Any, ...], name: str) -> Any:
    import tvm
    from tvm import relax

    lookup, attend, *drawing = kernels
    n, b, q, c = (tvm.tirx.Var(letter, "int64") for letter in "nbqc")
    tokens, rows, sampling_params = (
        _var("tokens", n),
        _var("rows", q),
        _var("sampling_params", q, WAYS, dtype="float64"),
    )
    sampled, masks = _var("sampled", q), _masks()
    cache = _sequences(n, b, c)
    forks, drafts, params = _var("forks", tvm.tirx.Var("f", "int64"), 3), name == "step", _params()
    none = relax.const(np.zeros((1, 3), np.int32))
    inputs = [tokens, rows, sampling_params, sampled, masks, *cache, *([forks] if drafts else []), params]
    with builder.function(name, inputs, pure=False):
        table = builder.emit(relax.TupleGetItem(params, 0))
        flat = builder.emit(relax.call_tir(lookup, [tokens, table], relax.TensorType((n, 4), "float32")))
        arguments = [flat, *cache, forks if drafts else none]
        logits = builder.emit(relax.call_tir(attend, arguments, relax.TensorType((n, VOCAB), "float32")))
        picked = builder.emit(relax.op.take(logits, rows, axis=0, mode="clip"))
        return builder.emit_func_output(
            _drawn(builder, drawing, (picked, sampling_params, sampled, masks), (q, VOCAB))
        )


def _masks() -> Any:
    import tvm

    return _var("masks", *(tvm.tirx.Var(name, "int64") for name in "mw"))


def _emit_sample_tokens(builder: Any, *kernels: Any) -> None:
    """Emits the function `sample_tokens` of a compiled library, with the parameters that it has in real
    libraries. kernels: one that masks logits, and one that samples."""
    import tvm

    q, v = (tvm.tirx.Var(name, "int64") for name in "qv")
    logits, sampling_params = (
        _var("logits", q, v, dtype="float32"),
        _var("sampling_params", q, WAYS, dtype="float64"),
    )
    inputs = [logits, sampling_params, _var("tokens", q), _masks()]
    with builder.function("sample_tokens", inputs, pure=False):
        builder.emit_func_output(_drawn(builder, kernels, inputs, (q, v)))


def _drawn(builder: Any, kernels: Sequence[Any], inputs: Sequence[Any], shape: tuple[Any, Any]) -> Any:
    """Emits Relax code that masks logits and then samples a token from each row. Returns the variable of the
    masked logits. kernels: (the masking kernel, the sampling kernel); inputs: logits, sampling parameters,
    the tensor for the sampled tokens, masks; shape: (rows, vocabulary)."""
    from tvm import relax

    (masked, sample), (logits, sampling_params, sampled, masks) = kernels, inputs
    flat = relax.TensorType(shape, "float32")
    logits = builder.emit(relax.op.call_tir_inplace(masked, [masks, logits], 1, flat))
    logits = builder.emit(relax.op.reshape(logits, (1, *shape)))
    kinds = [relax.TensorType((1, *shape), "float32"), relax.TensorType(shape[:1], "int32")]
    both = builder.emit(relax.op.call_tir_inplace(sample, [logits, sampling_params, sampled], [0, 2], kinds))
    return builder.emit(relax.TupleGetItem(both, 0))


def _lookup() -> Any:
    from tvm.script import tirx as T

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]  # TVM is untyped
    def lookup(tokens_h: T.handle, table_h: T.handle, out_h: T.handle) -> None:
        n = T.int64()
        tokens = T.match_buffer(tokens_h, (n,), "int32")
        table = T.match_buffer(table_h, (260, 4), "float32")
        out = T.match_buffer(out_h, (n, 4), "float32")
        for i, j in T.grid(n, 4):
            with T.sblock("row"):
                vi, vj = T.axis.remap("SS", [i, j])
                out[vi, vj] = table[tokens[vi], vj]

    return lookup


def _attend() -> Any:
    from tvm.script import tirx as T

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]  # TVM is untyped
    def attend(  # noqa: PLR0917
        x_h: T.handle,
        pages_h: T.handle,
        positions_h: T.handle,
        slots_h: T.handle,
        indptr_h: T.handle,
        page_indptr_h: T.handle,
        table_h: T.handle,
        lengths_h: T.handle,
        forks_h: T.handle,
        out_h: T.handle,
    ) -> None:
        n, b, c, p, t, f = T.int64(), T.int64(), T.int64(), T.int64(), T.int64(), T.int64()
        x = T.match_buffer(x_h, (n, 4), "float32")
        pages = T.match_buffer(pages_h, (1, t, 2, 1, 16), "float32")
        positions = T.match_buffer(positions_h, (n,), "int32")
        slots = T.match_buffer(slots_h, (n,), "int32")
        indptr = T.match_buffer(indptr_h, (c,), "int32")
        page_indptr = T.match_buffer(page_indptr_h, (c,), "int32")
        table = T.match_buffer(table_h, (p,), "int32")
        _lengths = T.match_buffer(lengths_h, (b,), "int32")
        forks = T.match_buffer(forks_h, (f, 3), "int32")
        out = T.match_buffer(out_h, (n, 260), "float32")
        with T.sblock("root"):
            total = T.sblock_alloc_buffer((1,), "float32")
            for i in range(n):
                pages[0, slots[i] // 16, 0, 0, slots[i] % 16] = x[i, 0]
            for k in range(f):
                for j in range(forks[k, 2]):
                    pages[0, forks[k, 1], 0, 0, j] = pages[0, forks[k, 0], 0, 0, j]
            for s in range(b):
                for i in range(indptr[s], indptr[s + 1]):
                    total[0] = T.float32(0)
                    for j in range(positions[i] + 1):
                        total[0] = total[0] + pages[
                            0, table[page_indptr[s] + j // 16], 0, 0, j % 16
                        ] * T.cast(j % 7 + 1, "float32")
                    for v in range(260):
                        out[i, v] = T.float32(-0.5) * T.cast(
                            (v - T.cast(total[0], "int32") % 260 + 260) % 260, "float32"
                        )

    return attend


if __name__ == "__main__":
    if len(sys.argv) > 2:
        LIMITS["context_window"] = int(sys.argv[2])
    write(Path(sys.argv[1]))
