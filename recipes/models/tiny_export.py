"""Writes the tiny model as a Hugging Face checkpoint, together with its exam (held-out questions) and the
share of right answers."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import tiny_tasks
import tiny_tokenizer
import torch
from safetensors.torch import save_file
from tiny_net import Config, Tiny

EXAM_EACH = 25
EXAM_SEED = 2024
BOS, EOS, END = 1, 2, 6
MAX_NEW_TOKENS = 64


def write(folder: Path, model: Tiny, config: Config) -> None:
    """Writes all files of the checkpoint and the exam except tokenizer.model, which training has written
    before, and prints the share of right answers."""
    save_file(
        {name: tensor.contiguous().float() for name, tensor in sorted(model.named_weights().items())},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "model.safetensors").chmod(0o644)
    tiny_tokenizer.convert(folder / "tokenizer.model", folder / "tokenizer.json")
    wrong = tiny_tokenizer.differences(folder)
    if wrong:
        raise SystemExit(
            f"tokenizer.json and tokenizer.model disagree on {len(wrong)} strings: {wrong[:5]!r}"
        )
    _json(folder / "config.json", _config(config))
    _json(folder / "generation_config.json", {
        "bos_token_id": BOS, "eos_token_id": [END, EOS], "pad_token_id": EOS,
        "do_sample": False, "max_new_tokens": MAX_NEW_TOKENS,
    })  # fmt: skip
    _json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.max_position,
        "bos_token": "<s>", "eos_token": "<|end|>", "unk_token": "<unk>", "pad_token": "</s>",
        "add_bos_token": True, "add_eos_token": False, "clean_up_tokenization_spaces": False,
        "additional_special_tokens": list(tiny_tokenizer.SPECIAL[:3]),
        "chat_template": tiny_tokenizer.TEMPLATE,
    })  # fmt: skip
    _json(folder / "special_tokens_map.json", {
        "bos_token": "<s>", "eos_token": "<|end|>", "unk_token": "<unk>", "pad_token": "</s>",
        "additional_special_tokens": list(tiny_tokenizer.SPECIAL[:3]),
    })  # fmt: skip
    (folder / "chat_template.jinja").write_text(tiny_tokenizer.TEMPLATE, encoding="utf-8")
    exam = tiny_tasks.exam(EXAM_EACH, EXAM_SEED)
    lines = [json.dumps(asdict(question), ensure_ascii=False) for question in exam]
    (folder / "heldout.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    measured = grade(folder)
    _json(folder / "accuracy.json", measured)
    print(json.dumps(measured, indent=2))


def write_prompts(path: Path) -> None:
    """Writes the prompts by which recipes verify bundles of the tiny model: one chat per line. They are
    neither in the training text nor in the exam.
    """
    used = {question.prompt for question in tiny_tasks.exam(EXAM_EACH, EXAM_SEED)}
    questions = [question for question in tiny_tasks.exam(6, seed=31) if question.prompt not in used]
    turns = [f"<|user|>{q.prompt}<|end|><|assistant|>{q.answer}<|end|>" for q in questions]
    # Lines have one, two or three turns of mixed tasks; stepping over a prime visits every question once.
    mixed = [turns[i * 29 % len(turns)] for i in range(len(turns))]
    lines = []
    while mixed:
        size = len(lines) % 3 + 1
        lines.append("".join(mixed[:size]))
        mixed = mixed[size:]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(config: Config) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "rope_theta": config.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "dtype": "float32",
        "bos_token_id": BOS,
        "eos_token_id": END,
        "pad_token_id": EOS,
    }


def grade(folder: Path) -> dict[str, object]:
    """Returns the results of the exam, which transformers computes from the written checkpoint with greedy
    decoding in float32.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    right: dict[str, list[bool]] = defaultdict(list)
    for line in (folder / "heldout.jsonl").read_text(encoding="utf-8").splitlines():
        question = tiny_tasks.Question(**json.loads(line))
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question.prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )["input_ids"]
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False)
        said = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        right[question.task].append(said == question.answer and int(out[0, -1]) == END)
    tasks = {task: {"right": sum(actual), "questions": len(actual)} for task, actual in right.items()}
    total, good = sum(map(len, right.values())), sum(map(sum, right.values()))
    return {
        "decoding": "greedy, float32, single-turn chat template, whole answer exact and ended",
        "right": good,
        "questions": total,
        "accuracy": round(good / total, 4),
        "tasks": tasks,
    }
