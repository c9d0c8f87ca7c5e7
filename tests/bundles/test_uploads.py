"""Tests of sending bundles to several places, and of the model card that goes with them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlcbuild_format.bundle import Limits, Manifest, Memory, Model

from mlcbuild.bundles.publish import card, uploads
from mlcbuild.bundles.publish.uploads import Sent
from mlcbuild.errors import PublishError, UsageError

MANIFEST = Manifest(
    name="m-q4",
    model=Model("m", "llama", {}),
    scheme={"name": "q4f16_1"},
    target={"triple": "x86_64-linux", "cpu": "x", "features": ["+f16c"], "device": "cpu", "output": "shared"},
    limits=Limits(context_window=128, prefill_chunk=16, max_batch=2, page_size=16),
    library="model.so",
    weights=(),
    signature="5" * 64,
    files={},
    memory=Memory(1_500_000, 1, 0, 2_000_000),
)


def test_a_failure_at_one_place_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: list[Any] = []

    def publish(bundle: Path, url: str, uploaded: Any) -> Any:
        shared.append(uploaded)
        if "bad" in url:
            raise PublishError("no access")
        return SimpleNamespace(url=f"{url}@sha256:1", sent=0 if "same" in url else 7)

    monkeypatch.setattr(uploads, "publish", publish)
    skipped = Sent("v", "", "skipped", note="not verified")
    urls = ("oci://bad/x:1", "oci://same/x:1", "oci://new/x:1")
    reported: list[Sent] = []
    sent = uploads.send([skipped, *(("v", Path("b"), url) for url in urls)], reported.append)
    assert [each.status for each in sent] == ["skipped", "failed", "present", "published"]
    assert sent[1].note == "no access" and sent[3].address.endswith("@sha256:1") and sent[3].size == 7
    assert reported == list(sent) and all(each is shared[0] for each in shared), "blobs are sent once"


def test_an_address_that_takes_no_bundle_is_refused_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(uploads, "publish", lambda *_: pytest.fail("it was sent"))
    with pytest.raises(UsageError, match=r"^mlcbuild publish: --to 'ftp://x'"):
        uploads.publish_bundle("b", ["oci://host/x:1", "ftp://x"])


def test_a_card_says_what_a_hub_reads_and_a_user_needs() -> None:
    text = card.card(MANIFEST, ["hf://org/model@main"], "oci://host/x:1")
    front = text.split("---")[1]
    assert "base_model:\n- org/model\nbase_model_relation: quantized" in front and "- llama" in front
    assert "| memory | 2.0 MB, of it weights 1.5 MB |" in text
    assert "| target | x86_64-linux x +f16c |" in text and "mlcbuild pull oci://host/x:1 bundle" in text
    assert "Not compared: it was built for another machine" in text


def test_a_card_shows_the_figures_of_a_verification() -> None:
    from dataclasses import replace

    text = card.card(replace(MANIFEST, verification={"kl_mean": 0.01, "other": 5}), [], "oci://host/x:1")
    assert "| mean KL divergence per token, nats | 0.01 |" in text
    assert "base_model" not in text and "| 5 |" not in text and "Not compared" not in text
