"""What a request may ask of a model."""

from __future__ import annotations

from mlcbuild_runtime.bundle import check_tokens
from mlcbuild_runtime.errors import RequestError
from mlcbuild_runtime.request import Request
from mlcbuild_runtime.vm import Model


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
