"""Lists config.json fields that may occur in every model family: those that never change the numbers of a
forward pass, and those that change none if they have certain values."""

from __future__ import annotations

from collections.abc import Mapping

_BOOKKEEPING = {
    *("attn_implementation", "name_or_path"),
    *("cache_implementation", "dtype", "is_llama_config", "max_sequence_length", "model_max_length"),
    *("tokenizer_class", "torch_dtype", "transformers.js_config", "transformers_version", "unsloth_fixed"),
    *("unsloth_version", "use_bfloat16", "use_cache", "use_flash_attention", "use_flash_attn"),
}
_CLASS = {
    *("attribute_map", "base_config_key", "base_model_ep_plan", "base_model_fsdp_plan"),
    *("base_model_pp_plan", "base_model_tp_plan", "distributed_config", "extra_config_files", "extra_files"),
    *("has_no_defaults_at_init", "ignore_keys_at_rope_validation", "is_composition"),
    *("keys_to_ignore_at_inference", "model_input_names", "sub_configs", "sub_configs_defaults"),
    *("transformers_weights", "use_return_dict"),
}
"""Attributes of transformers' PretrainedConfig, which programs that write every attribute also put into
config.json. They change no results."""
_TRAINING = {
    *("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "classifier_dropout", "embd_pdrop"),
    *("gradient_checkpointing", "hidden_dropout", "hidden_dropout_prob", "initializer_range", "resid_pdrop"),
}
_TOKENS = {
    *("begin_suppress_tokens", "bos_token_id", "cls_token_id", "decoder_start_token_id", "eos_token_id"),
    *("forced_bos_token_id", "forced_eos_token_id", "mask_token_id", "pad_token_id", "sep_token_id"),
    *("suppress_tokens", "unk_token_id"),
}
_SAMPLING = {
    *("assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight"),
    *("assistant_lookbehind", "bad_words_ids", "cache_config", "compile_config", "constraints"),
    *("continuous_batching_config", "disable_compile", "diversity_penalty", "do_sample", "dola_layers"),
    *("early_stopping", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "epsilon_cutoff"),
    *("eta_cutoff", "exponential_decay_length_penalty", "force_words_ids", "forced_decoder_ids"),
    *("generation_kwargs", "guidance_scale", "is_assistant", "length_penalty", "low_memory"),
    *("max_cache_len", "max_length", "max_matching_ngram_size", "max_new_tokens", "max_time", "min_length"),
    *("min_new_tokens", "min_p", "no_repeat_ngram_size", "num_assistant_tokens"),
    *("num_assistant_tokens_schedule", "num_beam_groups", "num_beams", "num_return_sequences"),
    *("output_attentions", "output_hidden_states", "output_logits", "output_scores", "penalty_alpha"),
    *("prefill_chunk_size", "prefix", "prompt_lookup_num_tokens", "remove_invalid_values"),
    *("renormalize_logits", "repetition_penalty", "return_dict_in_generate", "return_legacy_cache"),
    *("sequence_bias", "speculation_type", "stop_strings", "target_lookbehind", "temperature"),
    *("token_healing", "top_h", "top_k", "top_p", "typical_p", "use_mtp", "watermarking_config"),
}
"""Names of the fields of transformers' GenerationConfig, which do not change a forward pass. Old versions of
transformers stored them in config.json, and some still do."""
_OUTPUTS = {
    *("chunk_size_feed_forward", "finetuning_task", "id2label", "label2id", "num_labels", "output_past"),
    *("problem_type", "return_dict", "task_specific_params", "tf_legacy_loss", "torchscript", "xla_device"),
}

QUANTIZATION = ("quantization_config", "compression_config", "quantization")
"""Names of the fields of config.json that describe how the weights of a checkpoint are stored. The code that
reads weights interprets them, and refuses values that it does not support."""

IRRELEVANT: frozenset[str] = frozenset(
    # pretraining_tp splits matrix products: it changes only the order of sums.
    _BOOKKEEPING | _CLASS | _TRAINING | _TOKENS | _SAMPLING | _OUTPUTS | {"pretraining_tp", *QUANTIZATION}
)
"""Names of the config.json fields that may have any value because they change no results. So may fields that
begin with an underscore, in which programs store notes."""

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
    "position_embedding_type": ("rope",),
    "pruned_heads": ({}, None),
    "query_pre_attn_scalar": (None,),
    "rope_interleaved": (False,),
    "sliding_window": (None,),
    "tie_encoder_decoder": (False,),
    "use_bidirectional_attention": (None, False),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
}
"""Field of config.json that switches on a feature which a model family may lack -> the values with which it
changes no results."""

OTHER_PARTS: frozenset[str] = frozenset(
    {
        *("audio_config", "audio_token_id", "boa_token_id", "boi_token_index", "eoa_token_id"),
        *("eoi_token_index", "image_seq_length", "image_token_id", "image_token_index"),
        *("mm_tokens_per_image", "multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size"),
        *("video_token_id", "vision_config", "vision_end_token_id", "vision_feature_layer"),
        *("vision_start_token_id", "tie_word_embeddings", "model_type", "text_config"),
    }
)
"""Names of the fields in a config.json with a `text_config` that the reader of the whole file may leave
unread: those that describe parts of a model which compute no text, such as a vision tower, and model_type,
text_config and tie_word_embeddings, which are read separately."""
