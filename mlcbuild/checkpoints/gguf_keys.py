"""Reads the metadata of a GGUF file key by key, and collects the problems of all keys, so that one
CheckpointError reports them together."""

from __future__ import annotations

import numpy as np

from mlcbuild.checkpoints.gguf_file import Gguf, shown
from mlcbuild.errors import CheckpointError
from mlcbuild.models.fields import MOST_UNKNOWN

Fields = dict[str, object]
"""The type of a config.json: name of a field -> its value."""
_NEUTRAL = ("vocab_size", "attention.value_length", "rope.scaling.finetuned")
"""Names of GGUF metadata keys, without the architecture in front, that have no effect on the computation."""


class GgufKeys:
    """Reads the GGUF metadata `<architecture>.<name>`, and tracks which keys were read: the method `close`
    reports the others, since they may change results."""

    def __init__(self, gguf: Gguf, place: str) -> None:
        self.gguf, self.place = gguf, place
        self._prefix = f"{gguf.metadata.get('general.architecture')}."
        self._read: set[str] = set()
        self._problems: list[str] = []

    def get(self, name: str) -> str | float | list[str] | tuple[float, ...] | None:
        """Returns the value of the GGUF metadata key `<architecture>.<name>`, numbers of an array as a tuple;
        None if the key is absent. The key counts as read from now on.
        """
        self._read.add(self._prefix + name)
        value = self.gguf.metadata.get(self._prefix + name)
        return tuple(value.tolist()) if isinstance(value, np.ndarray) else value

    def has_tensor(self, name: str) -> bool:
        return name in self.gguf.tensors

    def has_bias(self, kind: str) -> bool:
        """Returns True if a matrix of a GGUF model's first layer has a bias vector. kind: the matrix's name
        within the layer, such as "attn_q".
        """
        return self.has_tensor(f"blk.0.{kind}.bias")

    def integer(self, name: str, default: int | None = None) -> int:
        """Returns the positive integer under the GGUF metadata key `<architecture>.<name>`, or `default` if
        the key is absent. If there is neither, or the value is no positive integer, returns 1 and records a
        problem, which the method `close` raises."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        return int(self._problem(name, "an integer above 0", value))

    def count(self, name: str) -> int:
        """Returns the integer under the GGUF metadata key `<architecture>.<name>`; 0 if the key is absent. If
        the value is not an integer of at least 0, returns 1 and records a problem, which the method `close`
        raises."""
        value = self.get(name)
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
            return int(value or 0)
        return int(self._problem(name, "an integer of at least 0", value))

    def flag(self, name: str) -> bool:
        """Returns the boolean under the GGUF metadata key `<architecture>.<name>`; False if the key is
        absent. If the value is no boolean, returns True and records a problem, which the method `close`
        raises."""
        value = self.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        return bool(self._problem(name, "true or false", value))

    def number(self, name: str, default: float | None = None) -> float:
        """Returns the number under the GGUF metadata key `<architecture>.<name>` as a float, or `default`,
        unchanged, if the key is absent. The value in the file is rounded to float32 and then read from the
        shortest decimal text of this float32, such as 1e-6. If there is neither, or the value is no number,
        returns 1 and records a problem, which the method `close` raises."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(str(np.float32(value)))
        return self._problem(name, "a number", value)

    def _problem(self, name: str, rule: str, value: object) -> float:
        state = "it is missing" if value is None else f"found {str(value)[:40]!r}"
        self._problems.append(
            f"{self.place}: {self._prefix}{name} must be {rule}: {state}; fetch the file again"
        )
        return 1.0

    def refuse(self, name: str, why: str) -> None:
        """Records the problem that the metadata key `<architecture>.<name>` has a value that is not
        supported; the method `check` or `close` raises it. why: the reason, such as "must be 1", which
        follows the key and a colon in the message."""
        self._problems.append(f"{self.place}: {self._prefix}{name}: {why}; use the original checkpoint")

    def check(self) -> None:
        """Raises CheckpointError with the problems of the metadata recorded so far, if there are any."""
        if self._problems:
            raise CheckpointError("\n".join(dict.fromkeys(self._problems)))

    def close(self) -> None:
        """Raises CheckpointError with all problems of the metadata; does nothing if there are none. A key
        `<architecture>.<name>` that was never read is a problem, too, unless it is known to have no effect,
        since it may change results."""
        for name in ("expert_count", "expert_used_count"):
            is_read = self._prefix + name in self._read
            if not is_read and self.count(name):
                self.refuse(name, "no model of this architecture has experts")
        expected = self._read | {self._prefix + name for name in _NEUTRAL}
        unknown = [key for key in self.gguf.metadata if key.startswith(self._prefix) and key not in expected]
        for key in unknown[:MOST_UNKNOWN]:
            self._problems.append(
                f"{self.place}: the metadata key {shown(key)} is not understood, and it may change the "
                "model's numbers; use the original checkpoint"
            )
        if len(unknown) > MOST_UNKNOWN:
            self._problems.append(f"{self.place}: {len(unknown) - MOST_UNKNOWN} more keys are not understood")
        self.check()
