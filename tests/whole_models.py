"""Small models of transformers with random weights, one of each architecture."""

DECODERS = [
    "Apertus", "Arcee", "BioGpt", "Cohere", "Cohere2", "DeepseekV2", "DeepseekV3", "Ernie4_5",
    "Exaone4", "FlexOlmo", "GPT2", "GPTBigCode", "GPTNeoX", "Gemma", "Gemma2", "Gemma3Text",
    "Glm", "Glm4", "GptOss", "Granite", "GraniteMoe", "Helium", "Llama", "Mistral", "Mixtral",
    "ModernBertDecoder", "Nemotron", "OPT", "Olmo", "Olmo2", "Olmo3", "Olmoe", "Persimmon",
    "Phi", "Phi3", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "SeedOss", "SmolLM3", "StableLm",
    "Starcoder2",
]  # fmt: skip
ENCODER_DECODERS = ["Bart", "MBart", "Marian", "Pegasus", "T5", "UMT5", "Whisper"]
SIZES = {  # by the names that configs have for them
    name: size
    for size, names in {
        32: "hidden_size d_model n_embd word_embed_proj_dim",
        64: "intermediate_size d_ff n_inner ffn_dim decoder_ffn_dim encoder_ffn_dim vocab_size "
        "moe_intermediate_size shared_expert_intermediate_size",
        4: "num_attention_heads n_head num_heads encoder_attention_heads decoder_attention_heads "
        "num_experts num_local_experts n_routed_experts sliding_window",
        2: "num_hidden_layers n_layer num_layers num_decoder_layers encoder_layers decoder_layers "
        "num_key_value_heads num_experts_per_tok n_group topk_group",
        8: "head_dim d_kv relative_attention_num_buckets kv_lora_rank q_lora_rank qk_nope_head_dim "
        "qk_rope_head_dim v_head_dim num_mel_bins max_source_positions",
        40: "max_position_embeddings n_positions max_target_positions",
    }.items()
    for name in names.split()
}
SETTINGS = {
    "Gemma2": {"attn_logit_softcapping": 2.0},
    "DeepseekV2": {"num_key_value_heads": 4},
    "DeepseekV3": {"num_key_value_heads": 4},
    "Qwen2": {"use_sliding_window": True, "max_window_layers": 1},
}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 1}


def whole_model(name, **settings):
    """A small model, whose random weights are large enough for attention to matter."""
    import torch
    import transformers

    Config = getattr(transformers, f"{name}Config")
    kept = {key for key in SIZES if not isinstance(getattr(Config, key, property()), property)}
    sizes = {key: SIZES[key] for key in kept}
    config = Config(**sizes | ENDS | SETTINGS.get(name, {}) | settings)
    kinds = [f"{name.removesuffix('Text')}ForCausalLM", f"{name}LMHeadModel"]
    if name in ENCODER_DECODERS:
        kinds = [f"{name}ForConditionalGeneration", f"{name}MTModel"]
    kind = next(getattr(transformers, kind) for kind in kinds if hasattr(transformers, kind))
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.generation_config.eos_token_id = None
    return model
