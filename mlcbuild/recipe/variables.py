"""Replaces variables, written ${name}, in a recipe by their values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from mlcbuild.documents.document import MAX_BYTES, Data, Document, Scalar, Where, scalar
from mlcbuild.errors import Problems, close_names, did_you_mean

SECTION = "vars"
LARGEST = MAX_BYTES
"""Maximum number of characters of all texts of a recipe that refer to variables, together with the values
that replace the references: as many as a whole file may have."""

_REFERENCE = re.compile(r"\$\$\{|\$\{([^{}]*)(\}?)")


@dataclass(frozen=True)
class Variable:
    """A variable of a recipe, and the value by which references to it are replaced."""

    value: Scalar
    text: str
    """The text of the variable's value, as the recipe or the command line spells it. It replaces a reference
    that is only a part of a text, such as "model-${name}"."""


@dataclass
class Substitution:
    """The result of substituting variables in a recipe: the new document, and the problems that occurred."""

    document: Document
    origins: dict[Where, str] = field(default_factory=dict)
    """Path (keys and indices) of a value in the recipe that contained references to variables -> its text
    before substitution."""
    failed: set[Where] = field(default_factory=set)
    """Paths (keys and indices) of values in the recipe whose references to variables cannot be replaced.
    Other checks skip these values, since their messages would mislead."""
    problems: Problems = field(default_factory=Problems)
    used: set[str] = field(default_factory=set)
    size: int = 0
    """Number of characters so far: those of the recipe's texts that refer to variables, plus those of the
    values that replace the references. The sum is limited."""


def substitute(document: Document, settings: Mapping[str, str]) -> Substitution:
    """Replaces every ${name} in the values of a recipe outside of `vars`, and returns the result. settings:
    variable name -> value from the command line.

    A text that is exactly one reference becomes the variable's value with its type; `$${` becomes `${`.
    Unknown and unused variables, malformed references, and more substituted text than a recipe file may have
    are problems in the result; the texts concerned stay as they are. Raises InputError for more than 1000
    problems.
    """
    done = Substitution(document)
    if not isinstance(document.data, dict):
        return done
    variables = _variables(document, settings, done)
    texts = dict(document.texts)

    def convert(value: Data, where: Where) -> Data:
        if isinstance(value, dict):
            return {key: convert(item, (*where, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [convert(item, (*where, i)) for i, item in enumerate(value)]
        if not isinstance(value, str) or "${" not in value or not _replaceable(value, where, variables, done):
            return value
        reference = _REFERENCE.fullmatch(value)
        if reference and reference[2]:
            variable = variables[reference[1]]
            if not isinstance(variable.value, str):
                texts[where] = variable.text
            return variable.value
        return _REFERENCE.sub(lambda match: variables[match[1]].text if match[2] else "${", value)

    data = {key: value if key == SECTION else convert(value, (key,)) for key, value in document.data.items()}
    for name in variables:
        if name not in done.used:
            place = document.key_place((SECTION, name))
            done.problems.append(
                place.problem(f"variable '{name}' is never used: write ${{{name}}} or remove it")
            )
    done.document = replace(document, data=data, texts=texts)
    return done


def _replaceable(text: str, where: Where, variables: Mapping[str, Variable], done: Substitution) -> bool:
    """Returns True if all references to variables in a text can be replaced, which the caller then does.
    Otherwise adds the text's path to `failed` in `done`, the result so far, and problems there (for too much
    text only once). In both cases, the names in the references are added to `used` and the text to `origins`
    there. where: path of the text in the recipe; variables: name -> variable."""
    names = [match[1] for match in _REFERENCE.finditer(text) if match[0] != "$${"]
    if not names:
        return True
    done.used.update(names)
    done.origins[where] = text
    place, before = done.document.place(where), len(done.problems)
    for message in _faults(text, variables, done.used):
        done.problems.append(place.problem(message))
    if len(done.problems) == before and done.size <= LARGEST:
        done.size += len(text) + sum(len(variables[name].text) for name in names)
        if done.size > LARGEST:  # Reported once: texts after this one are not substituted.
            longest = max(names, key=lambda name: len(variables[name].text))
            done.problems.append(
                place.problem(
                    f"up to here variables make more than {LARGEST} letters, the limit: '{longest}' stands "
                    f"for {len(variables[longest].text)}; shorten it, or use it less often"
                )
            )
    if len(done.problems) > before or done.size > LARGEST:
        done.failed.add(where)
        return False
    return True


def _variables(document: Document, settings: Mapping[str, str], done: Substitution) -> dict[str, Variable]:
    """Returns name -> variable for the entries of a recipe's `vars` with a scalar value; the JSON schema
    reports the others. settings: variable name -> value from the command line, which replaces the recipe's.
    One with a wrong name or type is a problem in `done`, the result so far, and ignored. A value with a
    reference is a problem, too, but in the result."""
    section = document.get((SECTION,))
    variables: dict[str, Variable] = {}
    for name, value in (section if isinstance(section, dict) else {}).items():
        where = (SECTION, name)
        if isinstance(value, str) and "${" in value:
            message = f"variable '{name}' holds a ${{: a variable cannot use another"
            done.problems.append(document.place(where).problem(message))
        if value is not None and not isinstance(value, dict | list):
            variables[name] = Variable(value, document.texts.get(where, str(value)))
    for name, text in settings.items():
        if name not in variables:
            suggestion = did_you_mean(name, variables)
            message = f"--set {name}={text}: this recipe has no variable '{name}'; {suggestion}"
            done.problems.append(document.key_place((SECTION,)).problem(message))
            continue
        value = _like(variables[name].value, text)
        if value is None:
            kind = "true or false" if isinstance(variables[name].value, bool) else "a number"
            message = f"--set {name}={text}: variable '{name}' is {kind} here, and '{text}' is not"
            done.problems.append(document.place((SECTION, name)).problem(message))
            continue
        variables[name] = Variable(value, text)
    return variables


def _like(old: Scalar, text: str) -> Scalar:
    """Parses a text of the command line as a value of the same kind (text, number, or boolean; integers and
    fractions are one kind) as `old`, the variable's value in the recipe; returns None if that is
    impossible."""
    if isinstance(old, str):
        return text
    new = scalar(text)
    if isinstance(new, str) or isinstance(old, bool) != isinstance(new, bool):
        return None
    return new


def _faults(text: str, variables: Mapping[str, Variable], used: set[str]) -> Iterator[str]:
    """Yields an error message for each invalid reference to a variable, written ${name}, in a text of a
    recipe. used: names of variables to which the recipe refers; if an unknown name is probably a misspelling,
    the variable that it resembles is added, so that it is not also reported as unused."""
    for match in _REFERENCE.finditer(text):
        name, closed = match[1], match[2]
        if match[0] == "$${":
            continue
        if not closed:
            yield "'${' has no '}': write $${ for a literal ${"
        elif name not in variables:
            used.update(close_names(name, variables)[:1])
            yield f"variable '{name}' is unknown; {did_you_mean(name, variables)}"
