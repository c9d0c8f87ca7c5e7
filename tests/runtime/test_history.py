"""Tests of the responses that a server stores: which are kept, which are dropped, and the conversations that
they form."""

from __future__ import annotations

import pytest
from mlcbuild_format.errors import RequestError
from mlcbuild_runtime.openai.chat_documents import Prompt
from mlcbuild_runtime.openai.history import VALUE_BYTES, History, Item, Kept, listed
from mlcbuild_runtime.openai.responses_stream import ResponseOutput


def kept(name: str, *items: Item, before: tuple[Item, ...] = ()) -> Kept:
    output: list[Item] = [{"type": "message", "id": f"msg_{name}"}]
    return Kept({"id": name, "output": [*output]}, before, items)


def test_a_response_continues_the_conversation_before_it() -> None:
    history = History()
    assert history.before(None) == ()
    history.keep(kept("a", {"text": "hi"}))
    first = history.before("a")
    assert first == ({"text": "hi"}, {"type": "message", "id": "msg_a"})
    history.keep(kept("b", {"text": "more"}, before=first))
    assert history.before("b") == (*first, {"text": "more"}, {"type": "message", "id": "msg_b"})


def test_an_unknown_name_is_refused() -> None:
    history = History()
    for call in (history.find, history.forget):
        with pytest.raises(RequestError, match="there is no response 'x': it was never stored") as caught:
            call("x")
        assert (caught.value.status, caught.value.code) == (404, "response_not_found")
    with pytest.raises(RequestError) as caught:
        history.before("y" * 1000)
    assert caught.value.param == "previous_response_id" and len(str(caught.value)) < 200


def test_the_least_recently_used_responses_go_first() -> None:
    history = History(max_kept=2)
    history.keep(kept("a"))
    history.keep(kept("b"))
    history.find("a")
    history.keep(kept("c"))
    assert history.find("a") and history.find("c")
    with pytest.raises(RequestError):
        history.find("b")
    history.forget("a")
    with pytest.raises(RequestError):
        history.find("a")


def test_bytes_are_limited_and_freed() -> None:
    history = History(max_bytes=10_000)
    history.keep(kept("a", {"text": "x" * 6000}))
    history.forget("a")
    history.keep(kept("b", {"text": "x" * 6000}))
    history.keep(kept("c", {"text": "x" * 3000}))
    assert history.find("b") and history.find("c")
    history.keep(kept("d", {"text": "x" * 6000}))
    with pytest.raises(RequestError):
        history.find("b")
    history.keep(kept("e", {"text": "x" * 20_000}))
    with pytest.raises(RequestError):
        history.find("e")
    assert history.find("c") and history.find("d"), "one that is too large displaces no others"


def test_short_values_count_as_the_memory_that_they_take() -> None:
    """Checks that the memory of stored responses is not underestimated: a list of empty lists is short as
    JSON but large as Python objects."""
    count = 100
    history = History(max_bytes=VALUE_BYTES * count)
    history.keep(kept("a", {"list": [[] for _ in range(count)]}))
    with pytest.raises(RequestError):
        history.find("a")


def test_a_running_response_is_cancelled_once() -> None:
    history, ended = History(), list[str]()
    output = ResponseOutput("tiny", Prompt(0, 2), {})
    history.start(output, lambda: ended.append("now"))
    document = history.cancel(output.id)
    assert document is not None and document["status"] == "cancelled" and ended == ["now"]
    history.end(output)
    history.end(output)
    assert history.cancel(output.id) is None and ended == ["now"]


def test_items_are_listed_with_names() -> None:
    document = listed([{"text": "a"}, {"id": "own", "text": "b"}])
    assert document["data"] == [{"id": "item_0", "text": "a"}, {"id": "own", "text": "b"}]
    assert (document["first_id"], document["last_id"], document["has_more"]) == ("item_0", "own", False)
    assert listed([])["first_id"] is None
