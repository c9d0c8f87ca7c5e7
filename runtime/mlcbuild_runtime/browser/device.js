/** A GPU program on a WebGPU device: its buffers, pipelines and bind groups, and the launches of its functions. */
import { EngineError } from "./errors.js";
import { GUARANTEED, check, evaluate, scalarValues } from "./program.js";

const LIMITS = {
  maxStorageBuffersPerShaderStage: "storageBuffers",
  maxStorageBufferBindingSize: "bindingBytes",
  maxBufferSize: "bufferBytes",
  maxComputeInvocationsPerWorkgroup: "threads",
  maxComputeWorkgroupStorageSize: "sharedBytes",
  maxComputeWorkgroupsPerDimension: "workgroups",
};
/** Bytes between the uniforms of two launches: minUniformBufferOffsetAlignment is at most this. */
const RECORD = 256;
/** Bytes of weights that may wait in the browser's own memory before the GPU has copied them. */
const IN_FLIGHT = 64 * 2 ** 20;

/** Returns an adapter of this browser. Throws EngineError if it has none. */
export async function findAdapter(options = {}) {
  if (!globalThis.navigator?.gpu)
    throw new EngineError("this browser has no WebGPU on this page: use a current browser, and https or localhost", "no_webgpu");
  const adapter = await navigator.gpu.requestAdapter({ powerPreference: options.powerPreference ?? "high-performance" });
  if (!adapter)
    throw new EngineError("this browser offers no GPU: switch hardware acceleration on, or update the GPU's driver", "no_adapter");
  return adapter;
}

/** Returns what an adapter can do; offsets stay multiples of 256, which every device takes. */
export function limitsOf(adapter) {
  const limits = Object.entries(LIMITS).map(([name, own]) => [own, adapter.limits[name]]);
  return { ...GUARANTEED, ...Object.fromEntries(limits) };
}

/**
 * Returns the optional features of an adapter for which kernels have other texts, a Set of names.
 * @param {string[]} [allowed] names of features that may be used; by default all
 */
export function featuresOf(adapter, allowed) {
  const language = navigator.gpu.wgslLanguageFeatures ?? new Set(), own = new Set();
  if (adapter.features.has("subgroups") && language.has("subgroup_id")) own.add("subgroups");
  if (adapter.features.has("shader-f16")) own.add("shader-f16");
  if (language.has("packed_4x8_integer_dot_product")) own.add("packed_4x8_integer_dot_product");
  return new Set([...own].filter((name) => allowed?.includes(name) ?? true));
}

/** Returns the name of an adapter for people. */
export function describe(adapter) {
  const { vendor = "", architecture = "", description = "" } = adapter.info ?? {};
  return description || [vendor, architecture].filter(Boolean).join(" ") || "GPU";
}

/** Returns the pages that a layer's cache can have on a device, `most` at most. */
export function cachePages(program, most, limits) {
  const sizes = new Map([...program.sizes, ["pages", 1]]);
  const each = [...program.buffers.values()].filter((own) => own.kind === "cache").map((own) => evaluate(own.size, sizes));
  return Math.min(most, Math.floor(Math.min(limits.bindingBytes, limits.bufferBytes) / Math.max(1, ...each)));
}

/** Returns cosines and sines [rows, 2 * frequencies] of angles that are rounded to float32. */
export function angles(rope) {
  const half = rope.invFreq.length, table = new Float32Array(rope.rows * 2 * half);
  const frequencies = Float32Array.from(rope.invFreq);
  for (let row = 0; row < rope.rows; row++)
    for (let index = 0; index < half; index++) {
      const angle = Math.fround(row * frequencies[index]);
      table[row * 2 * half + index] = Math.cos(angle) * rope.factor;
      table[(row * 2 + 1) * half + index] = Math.sin(angle) * rope.factor;
    }
  return table;
}

/** A program whose buffers are allocated. `DeviceProgram.create` returns one. */
export class DeviceProgram {
  /**
   * Allocates the buffers of a program whose kernels are those for the device; `compile` must end before the first `run`. Throws EngineError for a
   * program that the device cannot run.
   */
  static async create(adapter, program, pages) {
    const own = new DeviceProgram();
    own.name = describe(adapter);
    own.program = program;
    own.pages = pages;
    own.launches = own.uniformUploads = 0;
    const limits = limitsOf(adapter);
    check(program, pages, limits);
    const requiredLimits = Object.fromEntries(Object.keys(LIMITS).map((name) => [name, adapter.limits[name]]));
    const requiredFeatures = [...featuresOf(adapter)].filter((name) => adapter.features.has(name));
    try {
      own.device = await adapter.requestDevice({ requiredFeatures, requiredLimits });
    } catch (error) {
      throw new EngineError(`${own.name} cannot be opened: ${line(error)}`, "no_adapter");
    }
    own.device.lost.then((info) => { own.lost = info; });
    own.device.onuncapturederror = (event) => { own.failure ??= line(event.error); };
    try {
      await own.#allocate();
    } catch (error) {
      own.close();
      throw error;
    }
    return own;
  }

  async #allocate() {
    const device = this.device;
    device.pushErrorScope("out-of-memory");
    device.pushErrorScope("validation");
    const usage = GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST;
    this.buffers = new Map();
    let bytes = 0;
    for (const [name, size] of this.program.bytes(this.pages)) {
      this.buffers.set(name, device.createBuffer({ size, usage }));
      bytes += size;
    }
    this.bytes = bytes;
    const errors = [await device.popErrorScope(), await device.popErrorScope()];
    const error = errors.find(Boolean);
    if (error || this.lost)
      throw new EngineError(`${this.name} has no room for the model's ${Math.ceil(bytes / 2 ** 20)} MiB: close other`
        + ` pages, or use a smaller model (${error ? line(error) : "the device was lost"})`, "out_of_memory");
    for (const [name, rope] of this.program.ropes) device.queue.writeBuffer(this.buffers.get(name), 0, angles(rope));
    this.prepared = new Map();
    this.inFlight = 0;
    this.staging = null;
  }

  /**
   * Compiles kernels; drivers take seconds for it, software adapters half a minute.
   * @param {Map<string, object>} kernels name -> kernel of the program; calls use no other ones
   * @param {Map<string, string>} sources name of a file -> its text
   * @param {(done: number, total: number) => void} onCompiled is called after each kernel
   */
  async compile(kernels, sources, onCompiled) {
    this.pipelines = new Map();
    const compile = async ([name, shader]) => {
      const entries = shader.bindings.map((binding, index) => ({
        binding: index,
        visibility: GPUShaderStage.COMPUTE,
        buffer: { type: binding.written ? "storage" : "read-only-storage" },
      }));
      entries.push({ binding: entries.length, visibility: GPUShaderStage.COMPUTE, buffer: { type: "uniform" } });
      const layout = this.device.createBindGroupLayout({ entries });
      try {
        const module = this.device.createShaderModule({ code: sources.get(shader.file) });
        const pipeline = await this.device.createComputePipelineAsync({
          layout: this.device.createPipelineLayout({ bindGroupLayouts: [layout] }),
          compute: { module, entryPoint: shader.entry },
        });
        this.pipelines.set(name, { pipeline, layout });
        onCompiled(this.pipelines.size, kernels.size);
      } catch (error) {
        throw new EngineError(`${shader.file}: ${this.name} does not take the kernel: ${line(error)}`, "bad_kernel");
      }
    };
    await Promise.all([...kernels].map(compile));
  }

  /** Writes bytes to a buffer, at an offset that is a multiple of 4; waits while too much is in flight. */
  async upload(name, offset, data) {
    this.write(name, data, offset);
    this.inFlight += data.byteLength;
    if (this.inFlight >= IN_FLIGHT) {
      await this.device.queue.onSubmittedWorkDone();
      this.inFlight = 0;
    }
  }

  /** Writes words to a buffer; calls that follow see them. */
  write(name, data, offset = 0) {
    this.#raise();
    this.device.queue.writeBuffer(this.buffers.get(name), offset, data);
  }

  /**
   * Executes calls of functions, [name, Map of sizes], in one submit, and returns words of buffers after them.
   * @param {Array<[string, Map<string, number>]>} calls @param {Array<[string, number, number]>} reads
   * (buffer, first word, words) @returns {Promise<Int32Array[]>}
   */
  async run(calls, reads = []) {
    this.#raise();
    const ready = calls.map(([name, sizes]) => this.#ready(name, sizes));
    const encoder = this.device.createCommandEncoder();
    const pass = encoder.beginComputePass();
    for (const own of ready)
      own.steps.forEach(({ pipeline, group }, index) => {
        const [x, y] = own.grids[index];
        if (!x || !y) return;
        pass.setPipeline(pipeline);
        pass.setBindGroup(0, group);
        pass.dispatchWorkgroups(x, y, 1);
        this.launches += 1;
      });
    pass.end();
    const size = reads.reduce((sum, [, , words]) => sum + 4 * words, 0);
    if (size && (this.staging?.size ?? 0) < size) {
      this.staging?.destroy();
      this.staging = this.device.createBuffer({ size, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST });
    }
    let end = 0;
    for (const [name, first, words] of reads) {
      encoder.copyBufferToBuffer(this.buffers.get(name), 4 * first, this.staging, end, 4 * words);
      end += 4 * words;
    }
    this.device.queue.submit([encoder.finish()]);
    if (!size) return [];
    try {
      await this.staging.mapAsync(GPUMapMode.READ, 0, size);
    } catch (error) {
      await this.#settle();
      this.#raise();
      throw new EngineError(`${this.name} failed: ${line(error)}; load the model again`, "device_failed");
    }
    const words = new Int32Array(this.staging.getMappedRange(0, size).slice(0));
    this.staging.unmap();
    this.#raise();
    end = 0;
    return reads.map(([, , count]) => words.subarray(end, (end += count)));
  }

  /** Gives a loss of the device the time to be reported. */
  async #settle() {
    if (!this.lost) await Promise.race([this.device.lost, new Promise((resume) => setTimeout(resume, 200))]);
  }

  #raise() {
    if (this.closed) throw new EngineError("the model was unloaded: load it again", "unloaded");
    if (this.lost)
      throw new EngineError(`${this.name} was lost (${line(this.lost)}): load the model again`, "device_lost");
    if (this.failure) throw new EngineError(`${this.name} failed: ${this.failure}; load the model again`, "device_failed");
  }

  #ready(name, sizes) {
    const variant = this.program.variant(name, sizes);
    let own = this.prepared.get(variant);
    if (!own) this.prepared.set(variant, (own = this.#prepare(variant)));
    const call = [...sizes].join();
    if (own.call !== call) {
      this.#setSizes(own, variant, sizes);
      own.call = call;
    }
    return own;
  }

  #prepare(variant) {
    const uniforms = this.device.createBuffer({
      size: RECORD * Math.max(1, variant.launches.length),
      usage: GPUBufferUsage.UNIFORM | GPUBufferUsage.COPY_DST,
    });
    const largest = new Map([...this.program.sizes, ...variant.sizes, ["pages", this.pages]]);
    const steps = variant.launches.map((launch, index) => {
      const shader = this.program.kernels.get(launch.kernel), { pipeline, layout } = this.pipelines.get(launch.kernel);
      const scalars = scalarValues(shader, launch, largest);
      const entries = shader.bindings.map((binding, place) => {
        const { name, offset } = launch.uses[place];
        const size = Math.max(4, Math.ceil(evaluate(binding.size, scalars) / 4) * 4);
        return { binding: place, resource: { buffer: this.buffers.get(name), offset, size } };
      });
      const resource = { buffer: uniforms, offset: RECORD * index, size: 4 * (shader.uniforms + 1) };
      entries.push({ binding: entries.length, resource });
      return { pipeline, group: this.device.createBindGroup({ layout, entries }) };
    });
    return { uniforms, steps, grids: [], call: null };
  }

  #setSizes(own, variant, sizes) {
    const words = new Uint32Array((RECORD / 4) * Math.max(1, variant.launches.length));
    const all = new Map([...sizes, ["pages", this.pages]]);
    own.grids = variant.launches.map((launch, index) => {
      const shader = this.program.kernels.get(launch.kernel), scalars = scalarValues(shader, launch, all);
      const [x, y] = shader.grid.map((extent) => evaluate(extent, scalars));
      const values = [...scalars.values()].slice(0, shader.uniforms);
      words.set([...values, Math.max(0, x - 1)], (RECORD / 4) * index);
      return [x, y];
    });
    this.device.queue.writeBuffer(own.uniforms, 0, words);
    this.uniformUploads += 1;
  }

  /** Frees the memory of the GPU. */
  close() {
    this.closed = true;
    for (const buffer of this.buffers?.values() ?? []) buffer.destroy();
    for (const own of this.prepared?.values() ?? []) own.uniforms.destroy();
    this.staging?.destroy();
    this.buffers = this.prepared = new Map();
    this.device?.destroy();
  }
}

const line = (error) => String(error?.message ?? error).split(/\s+/).join(" ").slice(0, 300) || "no reason was reported";
