"""Fields of a config.json that every family meets and that change no numbers of a forward pass."""

from __future__ import annotations

from collections.abc import Mapping

_BOOKKEEPING = {
    *("_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal"),
    *("_commit_hash", "_flash_attn_2_enabled", "_name_or_path", "attn_implementation", "name_or_path"),
    *("cache_implementation", "dtype", "is_llama_config", "max_sequence_length", "model_max_length"),
    *("tokenizer_class", "torch_dtype", "transformers.js_config", "transformers_version", "unsloth_fixed"),
    *("unsloth_version", "use_bfloat16", "use_cache", "use_flash_attention", "use_flash_attn"),
}
_TRAINING = {
    *("attention_dropout", "attn_pdrop", "classifier_dropout", "embd_pdrop", "gradient_checkpointing"),
    *("hidden_dropout", "initializer_range", "resid_pdrop"),
}
_TOKENS = {
    *("begin_suppress_tokens", "bos_token_id", "cls_token_id", "decoder_start_token_id", "eos_token_id"),
    *("forced_bos_token_id", "forced_eos_token_id", "mask_token_id", "pad_token_id", "sep_token_id"),
    *("suppress_tokens", "unk_token_id"),
}
_SAMPLING = {
    *("bad_words_ids", "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size"),
    *("exponential_decay_length_penalty", "length_penalty", "max_length", "max_new_tokens", "min_length"),
    *("no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "prefix"),
    *("remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "temperature", "top_k"),
    *("top_p", "typical_p"),
}
_OUTPUTS = {
    *("chunk_size_feed_forward", "finetuning_task", "id2label", "label2id", "num_labels"),
    *("output_attentions", "output_hidden_states", "output_scores", "problem_type", "return_dict"),
    *("task_specific_params", "tf_legacy_loss", "torchscript"),
}

IRRELEVANT: frozenset[str] = frozenset(
    # pretraining_tp splits matrix products: it changes only the order of sums.
    _BOOKKEEPING | _TRAINING | _TOKENS | _SAMPLING | _OUTPUTS | {"pretraining_tp"}
)
"""Fields that may hold anything."""

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "attn_logit_softcapping": (None,),
    "cross_attention_hidden_size": (None,),
    "final_logit_softcapping": (None,),
    "full_attn_mod": (1,),
    "hidden_activation": (None,),
    "interpolate_factor": (1,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "lm_head_bias": (False,),
    "mlp_bias": (False,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "query_pre_attn_scalar": (None,),
    "rope_interleaved": (False,),
    "sliding_window": (None,),
    "tie_encoder_decoder": (False,),
    "use_bidirectional_attention": (None, False),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
}
"""Switches that families without the thing carry in a position that changes nothing."""
