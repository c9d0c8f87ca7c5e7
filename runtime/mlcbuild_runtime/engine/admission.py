"""Checks that a request fits the model before the engine accepts it; RequestError is raised for one that does
not."""

from __future__ import annotations

from mlcbuild_format.bundle import Manifest, check_tokens
from mlcbuild_format.errors import RequestError

from mlcbuild_runtime.engine.request import Request
from mlcbuild_runtime.executor.executor import Executor
from mlcbuild_runtime.text.tokenizer import Tokenizer


def answer_limit(request: Request, executor: Executor) -> int:
    """Returns the maximum number of tokens of a request's answer: its max_tokens, or the rest of the context
    (the model's or, if that is smaller, what the KV cache holds). Raises RequestError for an empty prompt, a
    prompt that does not fit the context with the answer, tokens outside the vocabulary, and an embedding that
    the bundle's library cannot compute."""
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
    max_tokens = request.max_tokens
    if max_tokens is not None and size + max_tokens > context:
        raise RequestError(
            f"the prompt has {size} tokens and max_tokens is {max_tokens}, {size + max_tokens} together,"
            f" but the context has {context}: ask for at most {context - size}",
            code="context_length_exceeded",
        )
    try:
        check_tokens(request.prompt, executor.manifest)
    except ValueError as error:
        raise RequestError(f"the prompt does not fit the model: {error}", param="prompt") from None
    return context - size if max_tokens is None else max_tokens


def longest_text(manifest: Manifest, tokenizer: Tokenizer) -> int:
    """Returns the size in bytes above which a text is refused, because its tokens are assumed not to fit the
    model's context.

    A token is assumed to have at most 16 bytes (prose and code average 3 to 9), or as many as the longest of
    the vocabulary if that has fewer. Such texts are refused before they are encoded: encoding 8 MiB takes ten
    seconds and a gigabyte of memory.
    """
    names = map(tokenizer.vocabulary.token_name, range(manifest.vocab_size))
    return min(16, max(len(name.encode()) for name in names)) * manifest.limits.context_window
