# mypy: ignore-errors

"""Writes gptq.safetensors and awq.safetensors: matrices as auto-gptq packs them and autoawq reads them, and
`<name>.values`, the float32 values that these packages compute from them.

    python tests/golden/packed/make.py QLINEAR PACKING

QLINEAR: auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py of auto-gptq 0.7.1; PACKING:
awq/utils/packing_utils.py of autoawq 0.2.9. Each file is loaded alone, because the packages need a GPU. It
needs torch, transformers and safetensors.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch
from safetensors.torch import save_file

HERE = Path(__file__).resolve().parent
INPUTS, OUTPUTS, GROUP = 64, 64, 32


def loaded(path):
    spec = spec_from_file_location(Path(path).stem, path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gptq(module, generator) -> None:
    tensors = {}
    for bits in (2, 3, 4, 8):
        top = (1 << bits) - 1
        linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
        linear.weight.data = torch.randn(OUTPUTS, INPUTS, generator=generator)
        groups = linear.weight.data.reshape(OUTPUTS, -1, GROUP)
        low = groups.amin(2)
        scales = ((groups.amax(2) - low) / top).half().float()
        zeros = torch.round(-low / scales).clamp(1, top)
        linear.weight.data = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, top)
        linear.weight.data = ((linear.weight.data - zeros[..., None]) * scales[..., None]).reshape(
            OUTPUTS, -1
        )
        quant_linear = module.QuantLinear(bits, GROUP, INPUTS, OUTPUTS, False)
        quant_linear.pack(linear, scales, zeros, None)
        values = quant_linear(torch.eye(INPUTS)).t()
        tensors |= {
            f"{bits}.qweight": quant_linear.qweight,
            f"{bits}.qzeros": quant_linear.qzeros,
            f"{bits}.values": values,
        }
        tensors[f"{bits}.scales"] = quant_linear.scales.half()
        tensors[f"{bits}.g_idx"] = (torch.arange(INPUTS) // GROUP).to(torch.int32)
    save_file({name: item.detach().contiguous() for name, item in tensors.items()}, HERE / "gptq.safetensors")


def awq(module, generator) -> None:
    words = torch.randint(-(2**31), 2**31, (INPUTS, OUTPUTS // 8), generator=generator).to(torch.int32)
    zeros = torch.randint(-(2**31), 2**31, (INPUTS // GROUP, OUTPUTS // 8), generator=generator)
    scales = torch.randn(INPUTS // GROUP, OUTPUTS, generator=generator).exp().half()
    zeros = zeros.to(torch.int32)
    values = module.dequantize_gemm(words, zeros, scales.float(), 4, GROUP).t()
    tensors = {"4.qweight": words, "4.qzeros": zeros, "4.scales": scales, "4.values": values.contiguous()}
    save_file(tensors, HERE / "awq.safetensors")


if __name__ == "__main__":
    generator = torch.Generator().manual_seed(0)
    gptq(loaded(sys.argv[1]), generator)
    awq(loaded(sys.argv[2]), generator)
