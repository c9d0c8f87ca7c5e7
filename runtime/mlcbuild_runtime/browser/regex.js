/** Translates the regular expressions of tokenizer.json (Oniguruma's syntax) to JavaScript's. */
import { EngineError, shown } from "./errors.js";

/** White space by Unicode's property: JavaScript's \s has U+FEFF too, and lacks U+0085. */
const SPACE = "\\t-\\r \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000";
const WORD = "\\p{Alphabetic}\\p{M}\\p{N}\\p{Pc}";
/** Letters besides upper and lower case that are equal to an ASCII letter without case. */
const FOLDED = { s: "\u017f", k: "\u212a" };
const SYNTAX = "^$\\.*+?()[]{}|/";

const bothCases = (letter) => {
  const low = letter.toLowerCase();
  return low + low.toUpperCase() + (FOLDED[low] ?? "");
};

/** A position in a pattern, the translated text, and the groups that are open. */
class Translator {
  constructor(pattern) {
    Object.assign(this, { pattern, at: 0, out: "", open: [], atom: 0, atomics: 0, ignoresCase: false });
  }

  refuse() {
    throw new EngineError(`tokenizer.json has the regular expression ${shown(this.pattern)}, which this package cannot translate`,
      "bad_tokenizer");
  }

  /** Moves behind the text of a sticky expression and returns its match; null where it does not match. */
  take(expression) {
    expression.lastIndex = this.at;
    const match = expression.exec(this.pattern);
    if (match) this.at = expression.lastIndex;
    return match;
  }

  /** Adds a whole atom, which a quantifier may follow. */
  add(text) {
    this.atom = this.out.length;
    this.out += text;
  }

  letter(letter) {
    if (this.ignoresCase && /[A-Za-z]/.test(letter)) this.add(`[${bothCases(letter)}]`);
    else this.add(SYNTAX.includes(letter) ? `\\${letter}` : letter);
  }

  /** Returns an escape, as it stands inside of a class or outside. */
  escape(inClass) {
    const property = this.take(/\\([pP])\{(\^?)([A-Za-z_]+)\}/y);
    if (property) {
      const [, letter, not, name] = property, negated = (letter === "P") !== (not === "^");
      const isGeneral = /^(L[ultmo]?|M[nce]?|N[dlo]?|P[cdseifo]?|S[mcko]?|Z[slp]?|C[cfson]?|Alphabetic|White_Space)$/.test(name);
      return `\\${negated ? "P" : "p"}{${isGeneral ? name : `Script=${name}`}}`;
    }
    const code = this.take(/\\(?:x\{([0-9A-Fa-f]{1,6})\}|x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4}))/y);
    if (code) return `\\u{${code[1] ?? code[2] ?? code[3]}}`;
    const [, letter] = this.take(/\\([\s\S])/y) ?? this.refuse();
    if (letter === "s") return inClass ? SPACE : `[${SPACE}]`;
    if (letter === "S") return inClass ? this.refuse() : `[^${SPACE}]`;
    if (letter === "d") return "\\p{Nd}";
    if (letter === "w") return inClass ? WORD : `[${WORD}]`;
    if ("nrtfv".includes(letter)) return `\\${letter}`;
    if (/[A-Za-z0-9]/.test(letter)) this.refuse();
    return SYNTAX.includes(letter) || letter === "-" && inClass ? `\\${letter}` : letter;
  }

  class() {
    const [opening] = this.take(/\[\^?/y);
    let out = opening;
    for (let isFirst = true; ; isFirst = false) {
      const letter = String.fromCodePoint(this.pattern.codePointAt(this.at) ?? this.refuse());
      if (letter === "]" && !isFirst) break;
      if (letter === "[" || (letter === "&" && this.pattern[this.at + 1] === "&")) this.refuse();
      if (letter === "\\") {
        out += this.escape(true);
        continue;
      }
      this.at += letter.length;
      if (this.ignoresCase && /[A-Za-z]/.test(letter)) {
        if (this.pattern[this.at] === "-") this.refuse();
        out += bothCases(letter);
      } else out += letter === "]" || letter === "/" ? `\\${letter}` : letter;
    }
    this.at += 1;
    this.add(`${out}]`);
  }

  quantifier() {
    const [text, , more] = this.take(/([*+?]|\{\d*,?\d*\})([+?]?)/y) ?? this.refuse();
    const own = more ? text.slice(0, -1) : text;
    if (more !== "+") this.out += text;
    else {
      // A possessive quantifier never gives back: a lookahead that is captured and then matched does the same.
      const group = `a${this.atomics++}`;
      this.out = `${this.out.slice(0, this.atom)}(?=(?<${group}>${this.out.slice(this.atom)}${own}))\\k<${group}>`;
    }
  }

  group() {
    const flag = this.take(/\(\?i:/y), atomic = flag ? null : this.take(/\(\?>/y);
    const plain = flag || atomic ? null : this.take(/\((?:\?(?:[:=!]|<[=!]))?/y);
    this.open.push([this.out.length, this.ignoresCase, atomic]);
    if (flag) this.ignoresCase = true;
    this.out += atomic ? `(?=(?<a${this.atomics}>` : plain && plain[0] !== "(" ? plain[0] : "(?:";
    if (atomic) atomic.end = `))\\k<a${this.atomics++}>`;
    if (this.pattern[this.at] === "?") this.refuse();
  }

  translate() {
    while (this.at < this.pattern.length) {
      const letter = String.fromCodePoint(this.pattern.codePointAt(this.at));
      if (letter === "(") this.group();
      else if (letter === "[") this.class();
      else if (letter === "\\") this.add(this.escape(false));
      else if ("*+?".includes(letter) || /^\{\d*,?\d*\}/.test(this.pattern.slice(this.at, this.at + 12))) this.quantifier();
      else {
        this.at += letter.length;
        if (letter === ")") {
          const [start, ignoresCase, atomic] = this.open.pop() ?? this.refuse();
          this.out += atomic ? atomic.end : ")";
          [this.atom, this.ignoresCase] = [start, ignoresCase];
        } else if ("|^$.".includes(letter)) this.add(letter);
        else this.letter(letter);
      }
    }
    return this.out;
  }
}

/** Returns a JavaScript RegExp with the flags g and u for an expression of a tokenizer. */
export function translated(pattern) {
  const translator = new Translator(pattern);
  const text = translator.translate();
  try {
    return new RegExp(text, "gu");
  } catch {
    return translator.refuse();
  }
}

/** Returns an expression that matches a text literally. */
export const literal = (text) => new RegExp(text.replace(/[\^$\\.*+?()[\]{}|/]/g, "\\$&"), "gu");
