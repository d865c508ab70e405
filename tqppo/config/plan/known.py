"""Shapes of well-known models, by name without the owner and without the variant (Instruct, Coder, a version)."""

from __future__ import annotations

from dataclasses import replace

from tqppo.config.plan.model_shape import Experts, ModelShape

KNOWN: dict[str, ModelShape] = {
    "qwen2.5-0.5b": ModelShape(896, 24, 14, 2, 4864, 151_936, 32_768, tied=True),
    "qwen2.5-1.5b": ModelShape(1536, 28, 12, 2, 8960, 151_936, 32_768, tied=True),
    "qwen2.5-3b": ModelShape(2048, 36, 16, 2, 11_008, 151_936, 32_768, tied=True),
    "qwen2.5-7b": ModelShape(3584, 28, 28, 4, 18_944, 152_064, 32_768),
    "qwen2.5-14b": ModelShape(5120, 48, 40, 8, 13_824, 152_064, 32_768),
    "qwen2.5-32b": ModelShape(5120, 64, 40, 8, 27_648, 152_064, 32_768),
    "qwen2.5-72b": ModelShape(8192, 80, 64, 8, 29_568, 152_064, 32_768),
    "qwen3-0.6b": ModelShape(1024, 28, 16, 8, 3072, 151_936, 40_960, tied=True, head_dim=128),
    "qwen3-1.7b": ModelShape(2048, 28, 16, 8, 6144, 151_936, 40_960, tied=True, head_dim=128),
    "qwen3-4b": ModelShape(2560, 36, 32, 8, 9728, 151_936, 40_960, tied=True, head_dim=128),
    "qwen3-8b": ModelShape(4096, 36, 32, 8, 12_288, 151_936, 40_960, head_dim=128),
    "qwen3-14b": ModelShape(5120, 40, 40, 8, 17_408, 151_936, 40_960, head_dim=128),
    "qwen3-32b": ModelShape(5120, 64, 64, 8, 25_600, 151_936, 40_960, head_dim=128),
    "llama-3.2-1b": ModelShape(2048, 16, 32, 8, 8192, 128_256, 131_072, tied=True, head_dim=64),
    "llama-3.2-3b": ModelShape(3072, 28, 24, 8, 8192, 128_256, 131_072, tied=True, head_dim=128),
    "llama-3.1-8b": ModelShape(4096, 32, 32, 8, 14_336, 128_256, 131_072),
    "llama-3.1-70b": ModelShape(8192, 80, 64, 8, 28_672, 128_256, 131_072),
    "llama-3.3-70b": ModelShape(8192, 80, 64, 8, 28_672, 128_256, 131_072),
    "meta-llama-3-8b": ModelShape(4096, 32, 32, 8, 14_336, 128_256, 8192),
    "meta-llama-3-70b": ModelShape(8192, 80, 64, 8, 28_672, 128_256, 8192),
    "smollm2-135m": ModelShape(576, 30, 9, 3, 1536, 49_152, 8192, tied=True),
    "smollm2-360m": ModelShape(960, 32, 15, 5, 2560, 49_152, 8192, tied=True),
    "smollm2-1.7b": ModelShape(2048, 24, 32, 32, 8192, 49_152, 8192, tied=True),
    "mixtral-8x7b": ModelShape(4096, 32, 32, 8, 14_336, 32_000, 32_768, experts=Experts(8, 2, 14_336)),
    "qwen3-30b-a3b": ModelShape(2048, 48, 32, 4, 6144, 151_936, 40_960, head_dim=128, experts=Experts(128, 8, 768)),
    "mistral-7b": ModelShape(4096, 32, 32, 8, 14_336, 32_768, 32_768),
}
KNOWN |= {
    "qwen2.5-math-1.5b": replace(KNOWN["qwen2.5-1.5b"], context=4096),
    "qwen2.5-math-7b": replace(KNOWN["qwen2.5-7b"], context=4096),
    "deepseek-r1-distill-qwen-1.5b": replace(KNOWN["qwen2.5-1.5b"], context=131_072, tied=False),
    "deepseek-r1-distill-qwen-7b": replace(KNOWN["qwen2.5-7b"], context=131_072),
    "deepseek-r1-distill-llama-8b": KNOWN["llama-3.1-8b"],
}
