"""Translates a model into a GPU program: launches of kernels from tokens to the residual stream, to logits,
to sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from mlcbuild_format.program import BoundBuffer, Launch, Program, RopeTable, evaluate, rounded
from mlcbuild_format.signature import signature

from mlcbuild import quant
from mlcbuild.compiler.gpu.attention_launches import attention_spec
from mlcbuild.compiler.gpu.call_sizes import FORKS, STEPS
from mlcbuild.compiler.gpu.expert_launches import most_tiles
from mlcbuild.compiler.gpu.kernels import logits, norm_rows
from mlcbuild.compiler.gpu.kernels.product import rows_per_workgroup
from mlcbuild.compiler.gpu.launches import LaunchBuilder
from mlcbuild.compiler.gpu.layer_launches import columns as layer_columns
from mlcbuild.compiler.gpu.layer_launches import layer_launches
from mlcbuild.models import Experts, frequencies, parameters


@dataclass(frozen=True)
class GpuDecoder:
    """Builds the GPU program of one model, with all functions, buffers and kernels."""

    build: LaunchBuilder

    def emit(self) -> Program:
        """Builds and returns the GPU program of the model. Afterwards self.build.emitter holds the source
        texts of its kernels. Raises CompileError if a kernel does not use one of its buffers or has a scalar
        with a reserved name; TVM's exceptions pass unchanged."""
        build = self.build
        calls, emitter, config = build.calls, build.emitter, build.config
        self._buffers()
        rows = rows_per_workgroup(calls.decode_rows)
        decode = {count: calls.decode_rows if count == rows[-1] else count for count in rows}
        emitter.function(
            "decode", {count: ({"n": most, "f": FORKS}, self._trunk(count)) for count, most in decode.items()}
        )
        prompt = {"n": calls.sizes["n"], "t": calls.sizes["t"]}
        emitter.function("prefill", {0: (prompt, self._trunk(None))})
        rows = rows_per_workgroup(calls.logit_rows)
        head = {count: calls.logit_rows if count == rows[-1] else count for count in rows}
        emitter.function("select", {0: ({"q": calls.logit_rows}, [self._select()])})
        emitter.function(
            "head",
            {count: ({"q": most}, [self._select(), *self._head(count)]) for count, most in head.items()},
        )
        self.emit_choice()
        tensors = quant.stored_parameters(parameters(config), build.scheme)
        params = tuple((item.name, list(item.shape), item.dtype, item.layout) for item in tensors)
        return Program(
            signature=signature(params),
            params=params,
            sizes=calls.sizes,
            kernels=emitter.shaders,
            buffers=emitter.buffers,
            inputs=calls.sections,
            ropes={f"rope.{index}": self._rope(index) for index in self._ropes},
            functions=emitter.functions,
        )

    @cached_property
    def _ropes(self) -> tuple[int, ...]:
        """Returns, in ascending order, the indices of the model's rotary embeddings that at least one layer
        uses."""
        used = {layer.mixer.rope for layer in self.build.config.layers}
        return tuple(index for index in range(len(self.build.config.ropes)) if index in used)

    def _rope(self, index: int) -> RopeTable:
        window = self.build.limits.context_window
        inv_freq, factor = frequencies(self.build.config.ropes[index], window)
        return RopeTable(window, inv_freq, factor)

    def _buffers(self) -> None:
        build, config, emitter = self.build, self.build.config, self.build.emitter
        columns: dict[str, int] = {"x": config.hidden_size, "normed": config.hidden_size}
        if any(layer.norms.after is not None for layer in config.layers):
            columns["x_next"] = config.hidden_size
        parts = 0
        for layer, index in {layer: index for index, layer in enumerate(config.layers)}.items():
            parts = max(parts, attention_spec(build, index, layer).part_columns)
            for name, count in layer_columns(build, index, layer).items():
                columns[name] = max(columns.get(name, 0), count)
        for name, count in columns.items():
            emitter.buffer(name, ("mul", "n", 4 * count))
        tiles = [
            evaluate(most_tiles(block, "n"), build.calls.sizes)
            for block in {layer.feed_forward for layer in config.layers}
            if isinstance(block, Experts)
        ]
        if tiles:
            emitter.buffer("tiles", 12 * max(tiles))
        emitter.buffer("part", 4 * build.calls.decode_rows * parts)
        logit_parts = -(-config.vocab_size // logits.PART)
        for name, count in {
            "selected": config.hidden_size,
            "logits": config.vocab_size,
            "best": 2 * logit_parts,
            "sampled": 1,
            "top": 2 + 2 * logits.CANDIDATES,
        }.items():
            emitter.buffer(name, ("mul", "q", 4 * count))
        emitter.buffer("history", 4 * STEPS * build.calls.mask_rows)
        emitter.buffer("masks", ("mul", "m", 4 * (1 + -(-config.vocab_size // 32))))
        emitter.buffer("inputs", 4 * build.calls.places.words, "inputs")
        for index, layer in enumerate(config.layers):
            page = 4 * attention_spec(build, index, layer).cache.page_words
            emitter.buffer(f"pages.{index}", ("mul", "pages", page), "cache")
        for index in self._ropes:
            table = self._rope(index)
            emitter.buffer(f"rope.{index}", rounded(table.rows * 8 * len(table.inv_freq)), "rope")

    def _trunk(self, rows: int | None) -> list[Launch]:
        """Returns the kernel launches from tokens to the residual stream after all layers. rows: rows of x
        per workgroup for the matrix-vector products (GEMVs) of decoding; None: matrix products (GEMMs) for
        prompts.
        """
        launches = self._embedding()
        for index, layer in enumerate(self.build.config.layers):
            launches += layer_launches(self.build, index, layer, rows)
        return [*launches, *self.build.settle()]

    def _embedding(self) -> list[Launch]:
        build, config, launches = self.build, self.build.config, list[Launch]()
        table, out = build.product("embed.weight"), "x" if config.embedding_norm is None else "normed"
        for first, count in build.parts("embed.weight"):
            shape = (count, config.hidden_size)
            arguments = (table.form, shape, config.embedding_scale, build.calls.places)
            buffers: dict[str, str | BoundBuffer] = {"inputs": "inputs", "x": out}
            buffers.update(build.matrix("embed.weight", first))
            launches.append(build.launch(logits.embed, arguments, {"n": "n", "first": first}, buffers))
        if config.embedding_norm is not None:
            norm = build.norm("embed_norm", config.embedding_norm, config.hidden_size)
            normed: dict[str, str | BoundBuffer] = {
                "x": out,
                "y": "x",
                **build.norm_buffers("embed_norm", norm),
            }
            launches.append(build.launch(norm_rows.norm, (norm,), {"n": "n"}, normed))
        if config.learned_positions:
            spec = build.product("position.weight")
            shape = (config.learned_positions, config.hidden_size)
            arguments = (spec.form, shape, config.position_offset, build.calls.places)
            buffers = {"inputs": "inputs", "x": "x", **build.matrix("position.weight")}
            launches.append(build.launch(logits.add_positions, arguments, {"n": "n"}, buffers))
        return launches

    def _select(self) -> Launch:
        build = self.build
        spec = build.norm("norm", build.config.norm, build.config.hidden_size)
        return build.launch(
            norm_rows.normed_rows,
            (spec, build.calls.places.words, build.calls.places.rows),
            {"n": build.calls.sizes["n"], "q": "q"},
            {"x": "x", "y": "selected", "inputs": "inputs", **build.norm_buffers("norm", spec)},
        )

    def _head(self, rows: int) -> list[Launch]:
        build, config = self.build, self.build.config
        name = "embed.weight" if config.tie_embeddings else "lm_head.weight"
        launches = []
        buffers: dict[str, str | BoundBuffer] = {"x": "selected", "y": "logits"}
        if config.head_bias:
            buffers["bias"] = "lm_head.bias"
        for first, count in build.parts(name):
            spec = build.product(
                name,
                "lm_head.bias",
                outputs=count,
                stride=config.vocab_size,
                first=first,
                scale=config.logit_scale,
                cap=config.logit_softcap,
            )
            launches.append(build.multiply(name, spec, rows, buffers, "q"))
        return launches

    def emit_choice(self) -> None:
        """Adds functions to the GPU program: `mask`, which excludes tokens, `greedy`, which chooses the token
        of each row's largest logit, `top`, which selects a row's 64 largest logits, and `advance`, which
        makes the chosen tokens the inputs of the next step."""
        build = self.build
        vocab, most = build.config.vocab_size, {"q": build.calls.logit_rows}
        greedy = [
            build.launch(logits.best_of_parts, (vocab,), {"q": "q"}, {"logits": "logits", "best": "best"}),
            build.launch(logits.best_of_row, (vocab,), {"q": "q"}, {"best": "best", "sampled": "sampled"}),
        ]
        build.emitter.function("greedy", {0: (most, greedy)})
        top = build.launch(logits.candidates, (vocab,), {"q": "q"}, {"logits": "logits", "top": "top"})
        build.emitter.function("top", {0: (most, [top])})
        mask = build.launch(
            logits.mask,
            (vocab,),
            {"q": build.calls.logit_rows, "m": "m"},
            {"logits": "logits", "masks": "masks"},
        )
        build.emitter.function("mask", {0: ({"m": build.calls.mask_rows}, [mask])})
        advance = build.launch(
            logits.advance,
            (build.calls.mask_rows, STEPS, build.calls.places),
            {"n": "n"},
            {"inputs": "inputs", "sampled": "sampled", "history": "history"},
        )
        build.emitter.function("advance", {0: ({"n": build.calls.mask_rows}, [advance])})
