"""Translates fields that vLLM, llama.cpp and others add to the request bodies of OpenAI's API to the fields
of this server.

A field with an equivalent here becomes that field. One whose value requests nothing is dropped. All others
stay, and the check of the body refuses them by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import Json, printable

from mlcbuild_runtime.openai.body import RequestBody, Table, is_among, not_among, parse_json, wrong

RENAMED: Mapping[str, str] = {
    "repeat_penalty": "repetition_penalty",
    "n_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
}
"""Field of another server -> this server's field of the same meaning."""
UNSET: Mapping[str, int] = {"top_k": -1, "seed": -1, "max_tokens": -1}
"""Field name -> the value by which clients of other servers leave the field unset, such as a seed of -1 for
any seed."""
NEUTRAL: Mapping[str, tuple[Json, ...]] = {
    "add_generation_prompt": (True,),
    "cache_prompt": (True, False),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "id_slot": (-1,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "mirostat": (0,),
    "n_discard": (0,),
    "n_keep": (0,),
    "n_probs": (0,),
    "parse_tool_calls": (True,),
    "post_sampling_probs": (False,),
    "repeat_last_n": (-1,),
    "return_progress": (False,),
    "return_token_ids": (False,),
    "return_tokens": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "tfs_z": (1,),
    "timings_per_token": (True, False),
    "top_n_sigma": (-1,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "xtc_probability": (0,),
}
"""Name of a field that other servers support -> values with which the field changes nothing here."""
CHOICES = 1024
"""Maximum number of texts in vLLM's request field `guided_choice`, which lists the possible answers."""
_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
FORMATS = (*_GUIDED, "json_schema", "structured_outputs")
"""Names of the request fields of other servers, such as vLLM's `guided_json`, that state the format of the
answer."""


def translated(body: Mapping[str, Json]) -> dict[str, Json]:
    """Returns a new request body in which fields of other servers, such as vLLM and llama.cpp, are replaced
    by this server's fields of the same meaning. Fields that are null or request nothing are left out; unknown
    fields stay. Raises RequestError for fields that contradict each other, or an invalid format of the
    answer."""
    fields: dict[str, Json] = {key: value for key, value in body.items() if value is not None}
    for key, allowed in NEUTRAL.items():
        if key in fields and is_among(fields[key], allowed):
            del fields[key]
    for key, name in RENAMED.items():
        if key in fields:
            value = fields.pop(key)
            if name in fields and fields[name] != value:
                raise RequestError(f"{key} and {name} mean the same: send one of them", param=key)
            fields[name] = value
    for key, number in UNSET.items():
        if is_among(fields.get(key), (number,)):
            del fields[key]
            if key == "top_k":
                fields[key] = 0  # 0 means all tokens, whatever the bundle's default is
    match fields.get("thinking"):
        case {"type": "enabled" | "disabled" as kind}:
            fields.setdefault("enable_thinking", kind == "enabled")
            del fields["thinking"]
    return _with_format(fields)


def checked(fields: Mapping[str, Json], table: Table) -> RequestBody:
    """Returns the checked fields of a request body, in which fields of other servers have been replaced
    already. table: the fields that this server accepts. Raises RequestError for an invalid or unknown field;
    if the field belongs to a feature that only other servers have, the error lists the values that are
    accepted."""
    for key, allowed in NEUTRAL.items():
        if key in fields and key not in table:
            raise not_among(key, fields[key], allowed, neutral=True)
    return RequestBody(fields, table)


def _with_format(fields: dict[str, Json]) -> dict[str, Json]:
    """Returns the fields of a request in which a field of vLLM or llama.cpp that states a response format,
    such as guided_json or json_schema, is replaced by OpenAI's `response_format`; `fields` itself is changed
    and returned. Raises RequestError for several formats, or an invalid one."""
    stated = {key: fields.pop(key) for key in (*_GUIDED, "json_schema") if key in fields}
    match fields.get("structured_outputs"):
        case dict() as outputs:
            del fields["structured_outputs"]
            stated |= {
                f"structured_outputs.{printable(key[:60])}": value
                for key, value in outputs.items()
                if value is not None
            }
    if not stated:
        return fields
    if len(stated) > 1 or "response_format" in fields:
        names = ", ".join([*stated, *(["response_format"] if "response_format" in fields else [])])
        raise RequestError(f"{names} state several formats: send one", param=next(iter(stated)))
    ((key, value),) = stated.items()
    fields["response_format"] = _format(key, value)
    return fields


def _format(key: str, value: Json) -> Json:
    """Returns OpenAI's `response_format` that means the same as the field `key`, such as guided_json, of vLLM
    or llama.cpp with the value `value`. Raises RequestError for an invalid value."""
    match key.replace("structured_outputs.", "guided_"), value:
        case "guided_json" | "json_schema", str(text):
            try:
                return _schema(key, parse_json(text.encode(), key))
            except ValueError:
                raise wrong(key, "a JSON schema, or one in a text", text) from None
        case "guided_json" | "json_schema", _:
            return _schema(key, value)
        case "guided_json_object", True:
            return {"type": "json_object"}
        case "guided_regex", str(text):
            return {"type": "regex", "regex": text}
        case "guided_grammar", str(text):
            return {"type": "grammar", "grammar": text}
        case "guided_choice", list(texts) if 0 < len(texts) <= CHOICES and all(
            isinstance(text, str) and text for text in texts
        ):
            listed = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
            return {"type": "grammar", "grammar": f"start: {listed}"}
        case "guided_choice", _:
            raise wrong(key, f"a list of 1 to {CHOICES} texts", value)
    raise wrong(key, "json, regex, choice, grammar or json_object with its value", value)


def _schema(key: str, value: Json) -> Json:
    if not isinstance(value, dict | bool):
        raise wrong(key, "a JSON schema, or one in a text", value)
    return {"type": "json_schema", "json_schema": {"schema": value}}


def without_unknown(body: Mapping[str, Json], table: Table) -> tuple[dict[str, Json], list[str]]:
    """Returns (body without unknown fields and without those that request a feature which this server lacks,
    names of the left-out fields). Invalid values of other fields stay. table: the fields that the server
    accepts."""
    supported, dropped = dict[str, Json](), list[str]()
    for key, value in body.items():
        field = table.get(key)
        allowed = field.schema.get("enum") if field is not None and field.neutral else None
        is_accepted = value is None or not isinstance(allowed, list) or is_among(value, allowed)
        if field is None or not is_accepted:
            dropped.append(key)
        else:
            supported[key] = value
    return supported, dropped
