/** The error of everything that this package refuses; its message is one sentence for people. */
export class EngineError extends Error {
  /** @param {string} message @param {string} code a word for programs, such as "quota" or "device_lost" */
  constructor(message, code = "engine_error") {
    super(message);
    this.name = "EngineError";
    this.code = code;
  }
}

/** Returns a value from a file as a short text for an error message. */
export function shown(value) {
  const text = value === undefined ? "nothing" : JSON.stringify(value);
  return text.length > 60 ? `${text.slice(0, 57)}...` : text;
}
