"""ModelConfig as JSON without floats, and its digest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from typing import TypeVar

from mlcbuild.canon import Json, digest
from mlcbuild.errors import CheckpointError
from mlcbuild.models.config import Activation, ModelConfig, Rope, faults
from mlcbuild.models.fields import show

T = TypeVar("T")


def to_json(config: ModelConfig) -> dict[str, Json]:
    """All fields under their own names; floats as the shortest text that reads back equal."""
    found = _plain(config)
    assert isinstance(found, dict)
    return found


def config_digest(config: ModelConfig) -> str:
    return digest("model-config/1", to_json(config))


def from_json(values: object, place: str = "model config") -> ModelConfig:
    """Reads what `to_json` wrote. Raises CheckpointError if it is anything else."""
    try:
        config = _model(values)
    except ValueError as error:
        raise CheckpointError(f"{place}: not a model config of mlcbuild: {error}") from None
    if found := faults(config):
        raise CheckpointError("\n".join(f"{place}: {fault}" for fault in found))
    return config


def _plain(value: object) -> Json:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    assert is_dataclass(value)
    return {field.name: _plain(getattr(value, field.name)) for field in dataclass_fields(value)}


class _Object:
    """A JSON object whose every key must be asked for."""

    def __init__(self, name: str, values: object) -> None:
        if not isinstance(values, Mapping):
            raise ValueError(f"{name} must be an object, found {show(values)}")
        self._name = name
        self._left = dict(values)

    def take(self, key: str, kind: Callable[[object], T]) -> T:
        if key not in self._left:
            raise ValueError(f"{self._name} has no '{key}'")
        try:
            return kind(self._left.pop(key))
        except ValueError as error:
            raise ValueError(f"{self._name}.{key}: {error}") from None

    def close(self) -> None:
        if self._left:
            raise ValueError(f"{self._name} has an unknown '{min(map(str, self._left))}'")


def _integer(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise ValueError(f"must be a positive integer, found {show(value)}")
    return value


def _float(value: object) -> float:
    try:
        found = float(value) if isinstance(value, str) else None
    except ValueError:
        found = None
    if found is None or repr(found) != value:
        raise ValueError(f"must be a number written as Python's repr in a string, found {show(value)}")
    return found


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, found {show(value)}")
    return value


def _family(value: object) -> str:
    if not isinstance(value, str) or not value.isidentifier():
        raise ValueError(f"must be the name of a family, found {show(value)}")
    return value


def _activation(value: object) -> Activation:
    if value == "silu":
        return "silu"
    if value == "gelu_tanh":
        return "gelu_tanh"
    raise ValueError(f"must be silu or gelu_tanh, found {show(value)}")


def _maybe(kind: Callable[[object], T]) -> Callable[[object], T | None]:
    return lambda value: None if value is None else kind(value)


def _each(kind: Callable[[object], T]) -> Callable[[object], tuple[T, ...]]:
    def read(value: object) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise ValueError(f"must be a list, found {show(value)}")
        return tuple(kind(item) for item in value)

    return read


def _rope(values: object) -> Rope:
    found = _Object("rope", values)
    rope = Rope(
        dim=found.take("dim", _integer),
        inv_freq=found.take("inv_freq", _each(_float)),
        attention_factor=found.take("attention_factor", _float),
        inv_freq_long=found.take("inv_freq_long", _maybe(_each(_float))),
        long_factor=found.take("long_factor", _maybe(_float)),
        original_max_position=found.take("original_max_position", _maybe(_integer)),
    )
    found.close()
    return rope


def _model(values: object) -> ModelConfig:
    found = _Object("config", values)
    config = ModelConfig(
        family=found.take("family", _family),
        vocab_size=found.take("vocab_size", _integer),
        hidden_size=found.take("hidden_size", _integer),
        intermediate_size=found.take("intermediate_size", _integer),
        num_layers=found.take("num_layers", _integer),
        num_heads=found.take("num_heads", _integer),
        num_kv_heads=found.take("num_kv_heads", _integer),
        head_dim=found.take("head_dim", _integer),
        max_position=found.take("max_position", _integer),
        norm_eps=found.take("norm_eps", _float),
        activation=found.take("activation", _activation),
        rope=found.take("rope", _rope),
        attention_scale=found.take("attention_scale", _float),
        windows=found.take("windows", _each(_maybe(_integer))),
        tie_embeddings=found.take("tie_embeddings", _flag),
        qkv_bias=found.take("qkv_bias", _flag),
        output_bias=found.take("output_bias", _flag),
        mlp_bias=found.take("mlp_bias", _flag),
        qk_norm=found.take("qk_norm", _flag),
        norm_offset=found.take("norm_offset", _float),
        post_norms=found.take("post_norms", _flag),
        embedding_scale=found.take("embedding_scale", _float),
        attention_softcap=found.take("attention_softcap", _maybe(_float)),
        logit_softcap=found.take("logit_softcap", _maybe(_float)),
    )
    found.close()
    return config
