"""Checks whether a quantization scheme fits a model and a device.

Results are cached, because thousands of variants may share few configs and schemes.
"""

from __future__ import annotations

from functools import lru_cache

from mlcbuild import quant
from mlcbuild.errors import UsageError
from mlcbuild.models import ModelConfig, parameters
from mlcbuild.quant.budget_limits import budget_fault, byte_limit
from mlcbuild.quant.format import load_format
from mlcbuild.targets.backends import Backend

listed_parameters = lru_cache(maxsize=256)(parameters)


@lru_cache(maxsize=1024)
def scheme_faults(scheme: quant.Scheme, device: Backend, config: ModelConfig) -> tuple[str, ...]:
    """Returns an error message for each override of a quantization scheme that matches no parameter of the
    model, or only parameters that earlier overrides match, and one if the model is too large for the scheme's
    budget of bytes or bits per weight even in the smallest candidate schemes; () if there is no fault. The
    budget is checked only if the device has kernels for the scheme."""
    params = listed_parameters(config)
    faults = quant.check_overrides(scheme, params)
    if scheme.budget is not None and storage_fault(scheme, device) is None:
        candidates = device.storage(scheme).candidates
        fault = budget_fault(scheme.budget.kind, scheme.budget.limit, candidates, params)
        faults += (fault,) if fault else ()
    return faults


@lru_cache(maxsize=1024)
def block_fault(device: Backend, config: ModelConfig) -> str | None:
    """Returns an error message if a device cannot compute a layer of a model; None if it can."""
    try:
        device.check(config)
    except UsageError as error:
        return str(error)
    return None


@lru_cache(maxsize=1024)
def storage_fault(scheme: quant.Scheme, device: Backend) -> str | None:
    """Returns an error message if a device has no kernels for the stored format of a scheme, of its overrides
    or of its candidates; None if it has kernels for all of these formats."""
    try:
        for part in (scheme, *(other for _, other in scheme.overrides), *scheme.candidates):
            load_format(part.format, device.layout(part))
    except UsageError as error:
        return str(error)
    return None


@lru_cache(maxsize=1024)
def most_stored_bytes(scheme: quant.Scheme, device: Backend, config: ModelConfig) -> int:
    """Returns the number of bytes that a model's weights take under a quantization scheme on a device; for a
    scheme among whose candidates a build step chooses, such as one with a budget (a limit of size, bits or
    loss), an upper bound. Raises UsageError for a format for which the device has no kernels."""
    params = listed_parameters(config)
    size = quant.stored_bytes(params, device.storage(scheme))
    if scheme.budget is None:
        return size
    limit = byte_limit(scheme.budget.kind, scheme.budget.limit, params)
    return size if limit is None else min(size, limit)
