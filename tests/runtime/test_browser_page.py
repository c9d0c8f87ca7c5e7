"""Tests of the chat page that runs a model in the browser, in Chromium with a GPU in software."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from mlcbuild_runtime.text.tokenizer import Tokenizer

from . import shared, toy
from .shared import Server
from .test_page import CHROMIUM, Browser
from .test_real import questions

# One browser loads the model once, whose kernels a software adapter compiles for minutes beside other tests.
pytestmark = [pytest.mark.xdist_group("chromium"), pytest.mark.timeout(1200)]

GPU = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader")
EVERY = "MLCBUILD_TEST_EVERY" in os.environ
QUESTIONS = 4
README = (shared.ROOT / "runtime" / "README.md").read_text()


def opened(url: str, profile: Path) -> Iterator[Browser]:
    """Yields a browser with the page at a URL. Skips the test without Chromium."""
    if CHROMIUM is None or shutil.which("bash") is None:
        pytest.skip("Chromium is not installed")
    browser = Browser(profile, GPU)
    try:
        browser.call("Page.navigate", url=url)
        yield browser
    finally:
        browser.close()


@pytest.fixture(scope="module")
def site(webgpu_bundle: Path) -> Iterator[Server]:
    with shared.serving(webgpu_bundle, "--browser") as running:
        yield running


@pytest.fixture(scope="module")
def page(site: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Yields a browser with an empty document of the site of the small model (recipes/models/tiny). Skips the
    test without Chromium. The chat page, which would load the model too, is tested with another model: to
    compile the small model's kernels takes 20 CPU seconds."""
    for browser in opened(f"{site.url}/errors.js", tmp_path_factory.mktemp("profile")):
        browser.until("document.readyState === 'complete'")
        yield browser


def evaluate(browser: Browser, body: str) -> Any:
    """Executes the body of an async JavaScript function on the page and returns its value. As long as lines
    of text appear on the page, it may take any time."""
    script = f"""
        window.result = null;
        (async () => {{ {body} }})().then(
            (value) => {{ window.result = {{ value: value ?? null }}; }},
            (error) => {{ window.result = {{ error: `${{error.name}}: ${{error.message}}` }}; }},
        ); 0"""
    browser.run(script)
    browser.until("window.result !== null", "`${window.lines?.length} ${document.body.innerText}`")
    result = browser.run("window.result")
    assert "error" not in result, result
    return result["value"]


ENGINE = """
    window.lines ??= [];
    window.engine ??= await (await import("./index.js")).loadEngine(
        "bundle/", { onProgress: (step) => window.lines.push(step) });
    const create = (content, more) => window.engine.chat.completions.create(
        { messages: [{ role: "user", content }], temperature: 0, ...more });
    const sum = "What is 20 + 11?";
    const message = (promise) => promise.then(() => null, (error) => error.message);
"""


def test_the_page_chats(webgpu_toy_bundle: Path, tmp_path: Path) -> None:
    prompt, count = "hi", 12
    with shared.serving(webgpu_toy_bundle, "--browser") as site:
        for page in opened(site.url, tmp_path):
            page.until("document.querySelectorAll('.error, #send:not([disabled])').length > 0")
            for name, value in {"temperature": 0, "max_tokens": count, "input": prompt}.items():
                page.run(f"document.getElementById('{name}').value = {json.dumps(value)}")
            page.run("document.getElementById('form').requestSubmit()")
            page.until("/tokens, the first after/.test(document.getElementById('status').textContent)")
            answer = page.run("document.querySelector('.assistant').textContent")
            assert page.run("document.title") == toy.NAME
    tokenizer = Tokenizer.load(webgpu_toy_bundle)
    tokens = toy.expected(tokenizer.chat([{"role": "user", "content": prompt}]), count)
    assert answer == tokenizer.decode(tokens)


def test_the_program_of_the_readme_prints_an_answer(page: Browser, webgpu_bundle: Path) -> None:
    (program,) = re.findall(r"^```js\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    program = re.sub(r'import (.*) from (".*");', r"const \1 = await import(\2);", program)
    program = program.replace("const engine =", "const engine = window.engine =")
    plain = "({ file, loaded, total }) => console.log(file, loaded, total)"
    kept = "(own) => { window.compiled = own.compiled; console.log(own.file, own.loaded, own.total); }"
    assert plain in program
    program = program.replace(plain, kept)
    body = f"window.lines = []; const console = {{ log: (...own) => window.lines.push(own) }}; {program}"
    evaluate(page, f"{body} return null;")
    progress = [line for line in page.run("window.lines") if len(line) == 3]
    assert progress[-1][1] == progress[-1][2] > 500_000
    compiled = page.run("window.compiled")
    assert compiled["done"] == compiled["count"] > 15, "the last of all kernels was reported"
    several_rows = len(list((webgpu_bundle / "kernels").iterdir())) - compiled["count"]
    assert several_rows >= 15, "kernels that one sequence never needs are not compiled"
    assert "".join(line[0] for line in page.run("window.lines") if len(line) == 1) == "31"


def test_the_engine_answers_the_held_out_questions(page: Browser) -> None:
    pairs = questions(QUESTIONS)
    body = f"""{ENGINE}
        const answers = [];
        for (const prompt of {json.dumps([prompt for prompt, _ in pairs])})
            answers.push((await create(prompt)).choices[0].message.content);
        return answers;"""
    answers = evaluate(page, body)
    right = sum(text == answer for text, (_, answer) in zip(answers, pairs, strict=True))
    assert right >= QUESTIONS - 1, list(zip(answers, pairs, strict=True))


BUNDLES = """
    const { Bundle } = await import("./bundle.js");
    const open = (options) => Bundle.open("bundle/", options);
    const path = "weights-00001-of-00001.safetensors";
    const ours = (own) => own.name.endsWith(path);
    const downloads = () => performance.getEntriesByType("resource").filter(ours).length;
    const store = await caches.open("mlcbuild-files");
"""


def test_files_that_are_stored_are_not_downloaded_again(page: Browser) -> None:
    body = f"""{BUNDLES}
        performance.clearResourceTimings();
        const size = (await (await open()).bytes(path)).length;
        const resources = performance.getEntriesByType("resource").map((entry) => entry.name);
        return [size, resources.filter((name) => name.includes("/bundle/"))];"""
    size, resources = evaluate(page, body)
    assert size > 500_000
    assert [name.rpartition("/")[2] for name in resources] == ["bundle.json"]


def test_two_pages_download_a_file_once_and_mend_what_is_damaged(page: Browser) -> None:
    body = f"""{BUNDLES}
        performance.clearResourceTimings();
        // The browser counts a download some time after its last byte has arrived.
        const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
        const counted = async (least) => {{
            for (let turn = 0; downloads() < least && turn < 500; turn++) await pause(20);
            return downloads();
        }};
        const [first, second] = await Promise.all([open(), open()]);
        await first.forget();
        const [one, other] = await Promise.all([first.bytes(path), second.bytes(path)]);
        const once = await counted(1);
        const digest = first.manifest.files.get(path).blake3;
        const key = (await store.keys()).find((own) => own.url.includes(digest));
        await store.put(key, new Response(new Uint8Array(one.length)));
        const mended = await first.bytes(path);
        const twice = await counted(2);
        await first.bytes(path);
        await pause(200);
        const equal = (other) => other.length === one.length && one.every((byte, at) => byte === other[at]);
        return [equal(other) && equal(mended), once, twice, downloads()];"""
    assert evaluate(page, body) == [True, 1, 2, 2]


def test_a_full_store_is_no_failure_and_is_named(page: Browser) -> None:
    body = f"""{BUNDLES}
        const put = Cache.prototype.put;
        Cache.prototype.put = () => Promise.reject(new DOMException("full", "QuotaExceededError"));
        try {{
            const notes = [], bundle = await open({{ onProgress: (step) => notes.push(step.note) }});
            await bundle.forget();
            return [(await bundle.bytes(path)).length, notes.at(-1)];
        }} finally {{
            Cache.prototype.put = put;
        }}"""
    size, note = evaluate(page, body)
    assert size > 500_000
    assert note.startswith("the browser has no room to keep the model (QuotaExceededError), so it will be")


def test_streams_choices_and_limits(page: Browser) -> None:
    body = f"""{ENGINE}
        const whole = await create(sum, {{ logprobs: true, top_logprobs: 2 }});
        const chunks = [];
        const usage = {{ include_usage: true }};
        const stream = await create(sum, {{ stream: true, stream_options: usage }});
        for await (const chunk of stream) chunks.push(chunk);
        const seeded = [];
        for (const more of [{{}}, {{ top_k: 5 }}, {{ top_p: 0.9 }}, {{ frequency_penalty: 1 }}])
            seeded.push(await create(sum, {{ temperature: 1, seed: 3, ...more }}));
        const short = await create(sum, {{ max_tokens: 1 }});
        const stopped = await create(sum, {{ stop: "1" }});
        return {{ whole, chunks, seeded, short, stopped }};"""
    results = evaluate(page, body)
    choice = results["whole"]["choices"][0]
    assert choice["message"]["content"] == "31"
    first = choice["logprobs"]["content"][0]
    assert first["token"] == "3" and -0.1 < first["logprob"] <= 0 and len(first["top_logprobs"]) == 2
    assert (
        "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in results["chunks"][:-1]) == "31"
    )
    usage = results["chunks"][-1]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    assert {answer["choices"][0]["message"]["content"] for answer in results["seeded"]} == {"31"}
    assert results["short"]["choices"][0]["finish_reason"] == "length"
    assert results["stopped"]["choices"][0]["message"]["content"] == "3"


ANSWER = {
    "type": "object",
    "properties": {
        "sum": {"type": "integer"},
        "words": {"type": "array", "items": {"enum": ["odd", "even", "größer"]}, "maxItems": 3},
        "note": {"type": ["string", "null"], "maxLength": 12},
    },
    "required": ["sum", "note"],
}


def test_answers_are_json_of_a_schema(page: Browser) -> None:
    body = f"""{ENGINE}
        const json_schema = {{ name: "sum", schema: {json.dumps(ANSWER)} }};
        const schema = {{ type: "json_schema", json_schema }};
        const own = async (seed, response_format, more) => (
            await create(sum, {{ temperature: 1, seed, response_format, ...more }})).choices[0];
        const answers = [];
        for (let seed = 0; seed < 2; seed++) answers.push(await own(seed, schema));
        answers.push(await own(7, schema, {{ temperature: 0 }}));
        const objects = [await own(1, {{ type: "json_object" }}, {{ max_tokens: 16 }})];
        const plain = await own(1, {{ type: "text" }});
        const refused = await message(create(sum, {{ response_format: {{ type: "regex", regex: "a" }} }}));
        return {{ answers, objects, plain, refused }};"""
    results = evaluate(page, body)
    whole = [answer for answer in results["answers"] if answer["finish_reason"] == "stop"]
    assert len(whole) >= 2, results["answers"]
    for answer in whole:
        jsonschema.validate(json.loads(answer["message"]["content"]), ANSWER, jsonschema.Draft202012Validator)
    for answer in results["objects"]:
        text = answer["message"]["content"]
        assert text.startswith("{"), text
        if answer["finish_reason"] == "stop":
            assert isinstance(json.loads(text), dict)
    assert results["plain"]["message"]["content"] == "31"
    assert results["refused"].startswith('response_format: must be {"type": "text"}')


def test_what_cannot_be_done_is_said_in_one_sentence(page: Browser) -> None:
    body = f"""{ENGINE}
        const aborted = new AbortController();
        aborted.abort();
        return [
            await message(create("x ".repeat(900))),
            await message(create("hi", {{ temperature: 3 }})),
            await message(create("hi", {{ tools: [] }})),
            await message(create([{{ type: "image_url" }}])),
            await message(create("hi", {{ signal: aborted.signal }})),
        ];"""
    long, range_, unknown, image, aborted = evaluate(page, body)
    assert "the context has room for 256: shorten it" in long
    assert range_ == "temperature must be a number from 0 to 2, found 3"
    assert unknown.startswith("unknown field 'tools'")
    assert image.startswith("messages[0].content must be text")
    assert "abort" in aborted


def test_requests_wait_for_each_other_and_end_early(page: Browser) -> None:
    body = f"""{ENGINE}
        const both = await Promise.all([sum, sum].map((prompt) => create(prompt)));
        for await (const chunk of await create(sum, {{ stream: true }}))
            if (chunk.choices[0].delta.content) break;
        const after = await create(sum);
        return [...both, after].map((own) => own.choices[0].message.content);"""
    assert evaluate(page, body) == ["31", "31", "31"]


@pytest.mark.skipif(not EVERY, reason="MLCBUILD_TEST_EVERY is not set: this loads the model once more")
def test_two_tabs_answer_at_the_same_time(page: Browser, site: Server) -> None:
    begin = f"""{ENGINE}
        window.answers = [await create(sum)];
        window.asking = (async () => {{
            while (!window.enough) window.answers.push(await create(sum));
        }})();
        return window.answers.length;"""
    assert evaluate(page, begin) == 1
    body = f"""{ENGINE}
        const texts = [];
        for (let turn = 0; turn < 3; turn++) texts.push((await create(sum)).choices[0].message.content);
        window.engine.unload();
        return texts;"""
    with page.other_tab(site.url):
        page.until("document.readyState === 'complete' && document.body.innerText")
        assert evaluate(page, body) == ["31"] * 3
    end = """
        window.enough = true;
        await window.asking;
        return window.answers.map((answer) => answer.choices[0].message.content);"""
    texts = evaluate(page, end)
    assert len(texts) > 3 and set(texts) == {"31"}


def test_a_lost_device_and_a_freed_one_are_named(page: Browser) -> None:
    """Checks the error messages after the GPU device is lost and after the model is unloaded. It runs last,
    because a later test would have to load the model again."""
    body = f"""{ENGINE}
        window.engine.device.device.destroy();
        const lost = await message(create("hi"));
        window.engine.unload();
        const unloaded = await message(create("hi"));
        window.engine = undefined;
        return [lost, unloaded];"""
    lost, unloaded = evaluate(page, body)
    assert "was lost (" in lost and lost.endswith("load the model again")
    assert unloaded == "the model was unloaded: load it again"
