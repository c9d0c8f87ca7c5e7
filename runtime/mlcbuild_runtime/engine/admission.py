"""Checks that a request fits the model."""

from __future__ import annotations

from mlcbuild_format.bundle import Manifest, check_tokens
from mlcbuild_format.errors import RequestError

from mlcbuild_runtime.engine.request import Request
from mlcbuild_runtime.executor.executor import Executor
from mlcbuild_runtime.text.tokenizer import Tokenizer


def answer_limit(request: Request, executor: Executor) -> int:
    """Returns the maximum tokens of the answer. Raises RequestError for a request that does not fit."""
    size, limits = len(request.prompt), executor.manifest.limits
    context = min(limits.context_window, executor.pages * limits.page_size)
    if not size:
        raise RequestError("the prompt has no tokens", param="prompt")
    if request.pooling is not None and "hidden_states" not in executor.capabilities:
        raise RequestError(
            "this bundle's library gives no hidden states, which embeddings are made of: build it again",
            code="no_embeddings",
        )
    answers = request.pooling is None and request.max_tokens != 0
    if size + answers > context:
        answer = ", answer included" if answers else ""
        raise RequestError(
            f"the prompt has {size} tokens, but the context has {context}{answer}: shorten it",
            code="context_length_exceeded",
        )
    wanted = request.max_tokens
    if wanted is not None and size + wanted > context:
        raise RequestError(
            f"the prompt has {size} tokens and max_tokens is {wanted}, {size + wanted} together, but the"
            f" context has {context}: ask for at most {context - size}",
            code="context_length_exceeded",
        )
    try:
        check_tokens(request.prompt, executor.manifest)
    except ValueError as error:
        raise RequestError(f"the prompt does not fit the model: {error}", param="prompt") from None
    return context - size if wanted is None else wanted


def longest_text(manifest: Manifest, tokenizer: Tokenizer) -> int:
    """Returns the bytes of a text above which its tokens do not fit the context.

    No token counts as more than 16 bytes (prose and code have 3 to 9): encoding 8 MiB takes ten seconds and a
    gigabyte.
    """
    names = map(tokenizer.vocabulary.token_name, range(manifest.vocab_size))
    return min(16, max(len(name.encode()) for name in names)) * manifest.limits.context_window
