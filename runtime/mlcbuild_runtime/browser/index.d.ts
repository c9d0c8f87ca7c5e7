/** Progress of loading a bundle. */
export interface Progress {
  /** The file that is read, or what loading waits for. */
  file: string;
  /** Number of bytes that have been read so far, of all files together. */
  loaded: number;
  total: number;
  /** Kernels that the GPU's driver has compiled, of all; null before the first one. */
  compiled: { done: number; count: number } | null;
  /** A sentence for people, for example that the browser has no room to keep the files; null if all is well. */
  note: string | null;
}

export interface LoadOptions {
  onProgress?: (progress: Progress) => void;
  signal?: AbortSignal;
  powerPreference?: "high-performance" | "low-power";
  /** Number of tokens for which the KV cache has room; at most and by default the bundle's context. */
  contextWindow?: number;
  /** Optional features of the GPU that may be used, such as "subgroups"; by default all that kernels know. */
  features?: string[];
}

export interface Message {
  role: string;
  content: string | { type: "text"; text: string }[];
  [field: string]: unknown;
}

export interface ChatRequest {
  messages: Message[];
  model?: string;
  temperature?: number | null;
  top_p?: number | null;
  top_k?: number | null;
  min_p?: number | null;
  seed?: number | null;
  max_tokens?: number | null;
  max_completion_tokens?: number | null;
  stop?: string | string[] | null;
  logprobs?: boolean | null;
  top_logprobs?: number | null;
  frequency_penalty?: number | null;
  presence_penalty?: number | null;
  repetition_penalty?: number | null;
  logit_bias?: Record<string, number> | null;
  /** The form that the answer must have. JSON schemas may use the keywords that runtime/README.md lists. */
  response_format?:
    | { type: "text" | "json_object" }
    | { type: "json_schema"; json_schema: { schema: object | boolean; [field: string]: unknown } }
    | null;
  stream_options?: { include_usage?: boolean } | null;
  /** More variables for the chat template. */
  chat_template_kwargs?: Record<string, unknown>;
  n?: 1 | null;
  user?: string;
  signal?: AbortSignal;
}

export interface TokenLogprob {
  token: string;
  logprob: number;
  bytes: number[];
}

export interface Logprobs {
  content: (TokenLogprob & { top_logprobs: TokenLogprob[] })[];
}

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  total_tokens: number;
  prompt_tokens_details: { cached_tokens: number };
}

export interface ChatCompletion {
  id: string;
  object: "chat.completion";
  created: number;
  model: string;
  choices: {
    index: number;
    message: { role: "assistant"; content: string };
    logprobs: Logprobs | null;
    finish_reason: "stop" | "length";
  }[];
  usage: Usage;
}

export interface ChatCompletionChunk {
  id: string;
  object: "chat.completion.chunk";
  created: number;
  model: string;
  choices: {
    index: number;
    delta: { role?: "assistant"; content?: string };
    logprobs: Logprobs | null;
    finish_reason: "stop" | "length" | null;
  }[];
  usage?: Usage;
}

export interface Engine {
  /** The bundle's name. */
  readonly model: string;
  /** The GPU's name. */
  readonly deviceName: string;
  /** Maximum number of tokens of prompt and answer together. */
  readonly context: number;
  readonly chat: {
    completions: {
      create(request: ChatRequest & { stream: true }): Promise<AsyncIterable<ChatCompletionChunk>>;
      create(request: ChatRequest & { stream?: false | null }): Promise<ChatCompletion>;
    };
  };
  /** Frees the memory of the GPU; requests after it are refused. */
  unload(): void | Promise<void>;
  /** Deletes the bundle's files from the browser's storage. */
  forget(): Promise<void>;
}

/** The error that this package throws; its message is one sentence for people. */
export class EngineError extends Error {
  code: string;
}

/** Loads the bundle at a URL, the directory of bundle.json, in this thread. */
export function loadEngine(url: string, options?: LoadOptions): Promise<Engine>;

/** Loads the bundle at a URL in a worker of its own, so that the page stays responsive. */
export function loadEngineInWorker(url: string, options?: LoadOptions): Promise<Engine>;
