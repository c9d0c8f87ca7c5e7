"""transformers as a child process: answers requests of ci/bench/types, one JSON object a line.

    {"fields": type}            -> {"fields": the default config of the type}
    {"folder": path, "seed": n} -> {"error": null}; folder/config.json became folder/saved, a checkpoint with
                                   random weights, and folder/logits.npy: float32 [tokens, vocab], of the
                                   ids in folder/tokens.json. logits64.npy holds those in float64, where
                                   the type can compute so
A failure is {"error": text}. Needs torch and transformers, and no package of mlcbuild.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

TWINS = 4
"""Number whose multiples are the seeds for which a random mixture-of-experts model has two equal experts in
each layer.
"""
ROUTERS = ("gate", "router")

torch: Any = importlib.import_module("torch")
transformers: Any = importlib.import_module("transformers")


def fields(name: str) -> dict[str, Any]:
    config: dict[str, Any] = transformers.AutoConfig.for_model(name).to_dict()
    return {"fields": config}


def run(folder: Path, seed: int) -> dict[str, Any]:
    config = transformers.AutoConfig.from_pretrained(folder)
    has_parts = hasattr(config, "text_config")
    kind = transformers.AutoModelForImageTextToText if has_parts else transformers.AutoModelForCausalLM
    # Its eager attention adds ALiBi's biases twice in Falcon (5.23.0); its default does not.
    attention = "sdpa" if getattr(config, "alibi", False) else "eager"
    how = {"attn_implementation": attention, "experts_implementation": "eager"}
    model = kind.from_config(config, dtype=torch.float32, **how).eval()
    tied = getattr(config, "tie_word_embeddings", False)
    with torch.no_grad():
        for name, values in {**dict(model.named_parameters()), **buffers(model)}.items():
            rng = np.random.default_rng([seed, crc32(name.encode())])
            values.copy_(torch.from_numpy(draw(rng, name, values.numpy(), tied)))
        if seed % TWINS == 0:
            copy_experts(model)
        model.save_pretrained(folder / "saved")
        ids = torch.tensor(json.loads((folder / "tokens.json").read_text()))
        logits = model(ids[None], use_cache=False).logits[0]
        np.save(folder / "logits.npy", logits.float().numpy())
        with suppress(RuntimeError):  # some types mix their float32 routers with float64
            np.save(folder / "logits64.npy", model.double()(ids[None], use_cache=False).logits[0].numpy())
    return {"error": None}


def copy_experts(model: Any) -> None:
    """Makes the first two experts of each layer of a torch model equal, in place and with their rows of the
    router, so that their scores tie. Two different experts would not do, since transformers does not define
    which one it chooses in a tie."""
    for name, values in {**dict(model.named_parameters()), **buffers(model)}.items():
        *path, last = name.split(".")
        rows = values.flatten() if "correction" in last else values
        is_of_experts = "correction" in last or any(part in path for part in (*ROUTERS, "experts"))
        if is_of_experts and "shared" not in name and len(rows) > 1:
            rows[1] = rows[0]


def buffers(model: Any) -> dict[str, Any]:
    """Returns name -> tensor (not a copy) of those buffers of a torch model that its checkpoint stores and
    that affect results: the corrections that routers add to their scores."""
    stored = set(model.state_dict())
    return {
        name: value
        for name, value in model.named_buffers()
        if name in stored and value.is_floating_point() and "correction" in name
    }


def draw(rng: np.random.Generator, name: str, initial: Any, is_tied: bool) -> Any:
    """Returns random weights, float32 and drawn from `rng`, for one parameter of a model that is compared
    with transformers. Their sizes keep activations near 1 and make attention far from uniform. name: the
    parameter's name; initial: its values as transformers initializes them, which give the shape, and are
    returned if the name ends in .beta or .eps; is_tied: True if the embedding is also the output matrix."""
    values = rng.standard_normal(initial.shape)
    if name.endswith((".beta", ".eps")):
        return initial
    if name.endswith(("alpha_p", "alpha_n", "bias", "sinks")):
        values = values * 0.3
    elif len(initial.shape) == 1 or "q_norm" in name or "k_norm" in name:
        # Norms are initialised with 1, or with 0 if 1 is added to them.
        values = values * 0.2 + np.round(initial.mean())
    elif "embed" in name or "wte" in name or "wpe" in name:
        values = values * (0.2 if is_tied else 0.7)
    else:
        values = values * 1.4 / np.sqrt(initial.shape[-1])
    return values.astype(np.float32)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "fields" in request:
                answer = fields(request["fields"])
            else:
                answer = run(Path(request["folder"]), request["seed"])
        except Exception as error:  # of any kind: whatever its checks of configs raise
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
