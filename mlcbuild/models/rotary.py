"""Computes inverse frequencies of rotary embeddings in float32, as transformers does.

Every operation is done in double precision and rounded to float32, one at a time. Powers may differ from
torch's in the last bit, because torch's are not correctly rounded; these are the same on every machine.
Attention factors are rounded to float32, too: their logarithms differ between C libraries in bits beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mlcbuild.models.rounding import f32


def default(theta: float, dim: int) -> tuple[float, ...]:
    """Returns the inverse frequencies 1 / theta^(2i/dim) for i in 0 .. dim/2 - 1 (Su et al., RoFormer,
    2021)."""
    return tuple(f32(1.0 / power) for power in _powers(theta, dim))


def linear(inv_freq: Sequence[float], factor: float) -> tuple[float, ...]:
    """Returns the unscaled inverse frequencies `inv_freq` divided by `factor`: position interpolation (Chen
    et al., 2023)."""
    return tuple(f32(value / f32(factor)) for value in inv_freq)


@dataclass(frozen=True)
class Llama3:
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


def llama3(inv_freq: Sequence[float], scaling: Llama3) -> tuple[float, ...]:
    """Returns inverse frequencies of a rotary embedding, scaled as in Llama 3.1: those of long waves are
    divided by the factor, those of short waves stay, and those between are blended. inv_freq: unscaled, in
    radians per position; scaling: the factor and the limits of long and short waves, as fields of config.json
    state them."""
    long_wave = scaling.original_max_position / scaling.low_freq_factor
    short_wave = scaling.original_max_position / scaling.high_freq_factor
    factor, low = f32(scaling.factor), f32(scaling.low_freq_factor)
    frequencies = []
    for value in inv_freq:
        wave = f32(f32(1.0 / value) * f32(2 * math.pi))
        if wave > long_wave:
            frequencies.append(f32(value / factor))
        elif wave < short_wave:
            frequencies.append(value)
        else:
            turns = f32(f32(1.0 / wave) * scaling.original_max_position)
            blend = f32(f32(turns - low) / f32(scaling.high_freq_factor - scaling.low_freq_factor))
            slow = f32(f32(f32(1.0 - blend) * value) / factor)
            frequencies.append(f32(slow + f32(blend * value)))
    return tuple(frequencies)


@dataclass(frozen=True)
class Yarn:
    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


def yarn(theta: float, dim: int, scaling: Yarn) -> tuple[float, ...]:
    """Returns the dim / 2 inverse frequencies of a rotary embedding scaled by YaRN (Peng et al., 2023). Those
    with more than beta_fast turns in the original context are not scaled, those with fewer than beta_slow are
    divided by the factor, and between them one changes gradually into the other. theta: base of the unscaled
    frequencies; scaling: the factor and the limits, as config.json states them."""

    def dimension(turns: float) -> float:
        """Returns the index of an inverse frequency, as a real number, with which a pair of dimensions makes
        `turns` full turns within the original context window."""
        ratio = scaling.original_max_position / (turns * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001  # as in transformers, where the ramp becomes a step
    frequencies = []
    for i, power in enumerate(_powers(theta, dim)):
        ramp = min(max(f32(f32(i - f32(first)) / f32(last - first)), 0.0), 1.0)
        unscaled_share = f32(1.0 - ramp)
        interpolated = f32(1.0 / f32(f32(scaling.factor) * power))
        frequencies.append(
            f32(f32(interpolated * f32(1.0 - unscaled_share)) + f32(f32(1.0 / power) * unscaled_share))
        )
    return tuple(frequencies)


def yarn_attention(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Returns the factor by which YaRN multiplies cos and sin if config.json states none. factor: ratio of
    the extended context to the original; mscale, mscale_all_dim: fields of YaRN's rope object, or None."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if mscale is not None and mscale_all_dim is not None:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)


def longrope(theta: float, factors: Sequence[float]) -> tuple[float, ...]:
    """Returns the inverse frequencies of a rotary embedding scaled by LongRoPE (Ding et al., 2024): as many
    as `factors` has entries, each divided by its entry. theta: base of the unscaled frequencies."""
    powers = _powers(theta, 2 * len(factors))
    return tuple(f32(1.0 / f32(f32(factor) * power)) for factor, power in zip(factors, powers, strict=True))


def longrope_attention(factor: float, original_max_position: int) -> float:
    if factor <= 1 or original_max_position <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original_max_position))


def _powers(theta: float, dim: int) -> list[float]:
    """Returns theta^(2i/dim) in float32 for i in 0 .. dim/2 - 1."""
    base = f32(theta)
    return [f32(math.pow(base, f32(i / dim))) for i in range(0, dim, 2)]
