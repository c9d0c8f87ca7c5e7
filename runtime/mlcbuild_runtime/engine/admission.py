"""What a request may ask of a model."""

from __future__ import annotations

from mlcbuild_format.bundle import check_tokens
from mlcbuild_format.errors import RequestError

from mlcbuild_runtime.devices.cpu import Model
from mlcbuild_runtime.engine.request import Request
from mlcbuild_runtime.text.tokenizer import Tokenizer


def answer_limit(request: Request, model: Model) -> int:
    """The most tokens that the answer may have. Raises RequestError for a request that does not fit."""
    size, limits = len(request.prompt), model.limits
    context = min(limits.context_window, model.pages * limits.page_size)
    if not size:
        raise RequestError("the prompt has no tokens", param="prompt")
    if request.pooling is not None and not model.gives_states:
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
        check_tokens(request.prompt, model.manifest)
    except ValueError as error:
        raise RequestError(f"the prompt does not fit the model: {error}", param="prompt") from None
    return context - size if wanted is None else wanted


def longest_text(model: Model, tokenizer: Tokenizer) -> int:
    """Returns the bytes of a text above which its tokens do not fit the context.

    No token counts as more than 16 bytes (prose and code have 3 to 9): encoding 8 MiB takes ten seconds and a
    gigabyte.
    """
    names = map(tokenizer.vocabulary.token_name, range(model.manifest.vocab_size))
    return min(16, max(len(name.encode()) for name in names)) * model.limits.context_window
