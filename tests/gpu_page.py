"""Runs single GPU kernels in headless Chromium, whose compiler of WGSL is Tint."""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from mlcbuild_format.program import evaluate
from numpy.typing import NDArray

from mlcbuild.compiler.gpu.shader_text import WGSL, lower
from mlcbuild.compiler.gpu.tensorir import for_features
from tests.gpu_kernels import Arrays, Make, padded, sizes
from tests.runtime.test_browser_page import GPU
from tests.runtime.test_browser_page import evaluate as value_of
from tests.runtime.test_page import CHROMIUM, Browser

RUN = """
    const adapter = await navigator.gpu.requestAdapter();
    const requiredFeatures = ["subgroups"].filter((name) => adapter.features.has(name));
    window.device ??= await adapter.requestDevice({ requiredFeatures });
    const { code, entry, buffers, uniforms, grid } = work, device = window.device;
    device.pushErrorScope("validation");
    const usage = GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST;
    const uniform = GPUBufferUsage.UNIFORM | GPUBufferUsage.COPY_DST;
    const readable = GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST;
    const filled = (bytes, usage) => {
        const buffer = device.createBuffer({ size: bytes.length, usage });
        device.queue.writeBuffer(buffer, 0, bytes);
        return buffer;
    };
    const bytesOf = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const own = buffers.map((text) => filled(bytesOf(text), usage));
    const last = filled(new Uint8Array(Int32Array.from(uniforms).buffer), uniform);
    const module = device.createShaderModule({ code });
    const pipeline = device.createComputePipeline({ layout: "auto", compute: { module, entryPoint: entry } });
    const entries = [...own, last].map((buffer, binding) => ({ binding, resource: { buffer } }));
    const encoder = device.createCommandEncoder(), pass = encoder.beginComputePass();
    pass.setPipeline(pipeline);
    pass.setBindGroup(0, device.createBindGroup({ layout: pipeline.getBindGroupLayout(0), entries }));
    pass.dispatchWorkgroups(...grid);
    pass.end();
    const copies = own.map((buffer) => {
        const copy = device.createBuffer({ size: buffer.size, usage: readable });
        encoder.copyBufferToBuffer(buffer, 0, copy, 0, buffer.size);
        return copy;
    });
    device.queue.submit([encoder.finish()]);
    const error = await device.popErrorScope();
    if (error) throw new Error(error.message);
    const results = [];
    for (const copy of copies) {
        await copy.mapAsync(GPUMapMode.READ);
        const bytes = Array.from(new Uint8Array(copy.getMappedRange()));
        results.push(btoa(bytes.map((byte) => String.fromCharCode(byte)).join("")));
    }
    for (const buffer of [...own, last, ...copies]) buffer.destroy();
    return results;
"""
"""JavaScript that runs in the browser: the body of a function that executes the kernel `work` and returns the
contents of its buffers."""


class _Handler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def page() -> Iterator[Browser]:
    """Yields a browser that shows an empty page and may use the GPU. Skips the test without Chromium."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with tempfile.TemporaryDirectory() as area:
        root = Path(area, "root")
        root.mkdir()
        (root / "index.html").write_text("<!doctype html><title>kernels</title>")
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, directory=str(root)))
        Thread(target=server.serve_forever, daemon=True).start()
        browser = Browser(Path(area, "profile"), GPU)
        try:
            browser.call("Page.navigate", url=f"http://127.0.0.1:{server.server_port}/")
            browser.until("document.title === 'kernels'")
            yield browser
        finally:
            browser.close()
            server.shutdown()
            server.server_close()


def on_page(
    browser: Browser,
    make: Make,
    arguments: tuple[object, ...],
    scalars: Mapping[str, int],
    arrays: Arrays,
    features: frozenset[str] = frozenset(),
) -> dict[str, NDArray[Any]]:
    """Executes one GPU kernel by WebGPU in a browser. Returns buffer name -> contents after the execution, in
    the type of the input, for every buffer that the kernel writes. make: function that creates the kernel
    from `arguments`; scalars: name -> integer argument; arrays: buffer name -> input; features: optional
    device features that the kernel uses."""
    with for_features(features):
        shader, text = lower(make("kernel", *arguments), WGSL)
    x, y = (evaluate(extent, scalars) for extent in shader.grid)
    buffers = [
        base64.b64encode(padded(arrays[binding.name], size)).decode()
        for binding, size in zip(shader.bindings, sizes(shader, scalars), strict=True)
    ]
    work = {
        "code": text,
        "entry": shader.entry,
        "buffers": buffers,
        "uniforms": [*(scalars[name] for name in shader.scalars[: shader.uniforms]), max(0, x - 1)],
        "grid": [x, y, 1],
    }
    results = value_of(browser, f"const work = {json.dumps(work)}; {RUN}")
    return {
        binding.name: np.frombuffer(base64.b64decode(result), arrays[binding.name].dtype)
        for binding, result in zip(shader.bindings, results, strict=True)
        if binding.written
    }
