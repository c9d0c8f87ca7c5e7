"""Messages of a chat, checked and made plain for a template."""

from __future__ import annotations

from mlcbuild_runtime.body import Body, checked_text, wrong
from mlcbuild_runtime.errors import RequestError
from mlcbuild_runtime.fields import Json, describe
from mlcbuild_runtime.template import Message

ROLES = ("system", "developer", "user", "assistant")


def messages(body: Body) -> tuple[Message, ...]:
    """The field `messages`. Raises RequestError, naming the message."""
    found = body.get("messages")
    if not isinstance(found, list) or not found:
        raise wrong("messages", "a list of at least one message", found)
    return tuple(_message(f"messages[{i}]", message) for i, message in enumerate(found))


def _message(where: str, message: Json) -> Message:
    """Role and content of one message; parts of text are joined."""
    if not isinstance(message, dict):
        raise wrong(where, "an object with role and content", message)
    role = message.get("role")
    if role not in ROLES:
        raise wrong(f"{where}.role", f"one of {', '.join(ROLES)}", role)
    for key, value in message.items():
        if key not in ("role", "content", "name", "refusal", "annotations") and value not in (None, []):
            raise RequestError(
                f"{where}.{key} is {describe(value)}, which this server cannot honour: leave it out",
                param=f"{where}.{key}",
                code="unsupported_field",
            )
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(f"{where}.content[{i}]", part) for i, part in enumerate(content))
    if not isinstance(content, str):
        raise wrong(f"{where}.content", "a text or a list of parts", content)
    # `developer` is OpenAI's newer name of `system`, which templates do not know.
    name = "system" if role == "developer" else str(role)
    return {"role": name, "content": checked_text(f"{where}.content", content)}


def _part(where: str, part: Json) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise wrong(where, 'a part such as {"type": "text", "text": "..."}: this model reads text only', part)
