"""The `config.json` of a peer: the architecture that chooses its program, and the keys it reads.

Sources: `configuration_grok1.py` of hpcai-tech/grok-1 and `grok1.py` of vllm-project/vllm;
`configuration_grok.py` of Aqwu/grok-1-hf; `grok.py` of sgl-project/sglang.
"""

from typing import Any

from export_grok.config import Dtype, GrokConfig
from export_grok.export.weights_to.options import Naming

__all__ = ["config_of_peer", "differences"]

# The code of the first two is not in transformers: it is looked for beside the weights.
_OWN: dict[Naming, dict[str, Any]] = {
    "hpcai": {
        "architectures": ["Grok1ModelForCausalLM"],
        "model_type": "grok-1",
        "auto_map": {
            "AutoConfig": "configuration_grok1.Grok1Config",
            "AutoModel": "modeling_grok1.Grok1Model",
            "AutoModelForCausalLM": "modeling_grok1.Grok1ModelForCausalLM",
        },
    },
    "keyfan": {
        "architectures": ["GrokForCausalLM"],
        "model_type": "grok",
        "auto_map": {
            "AutoConfig": "configuration_grok.GrokConfig",
            "AutoModel": "modeling_grok.GrokModel",
            "AutoModelForCausalLM": "modeling_grok.GrokForCausalLM",
        },
        "hidden_act": "gelu_pytorch_tanh",
    },
    "sglang": {
        "architectures": ["Grok1ForCausalLM"],
        "model_type": "mixtral",  # transformers knows none of its own
        "load_presharded_moe": False,  # else it looks for a file for each rank
    },
}


def config_of_peer(config: GrokConfig, names: Naming, dtype: Dtype) -> dict[str, Any]:
    """Return what stands in `config.json`."""
    experts = "num_experts" if names == "hpcai" else "num_local_experts"
    cap = "max_attn_value" if names == "hpcai" else "attn_logit_softcapping"
    return {
        **_OWN[names],
        "vocab_size": config.vocab_size,
        "hidden_size": config.emb_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_q_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.key_size,
        experts: config.num_experts,
        "num_experts_per_tok": config.num_selected_experts,
        "max_position_embeddings": config.sequence_len,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_base,
        cap: config.attn_logit_cap,
        "attn_output_multiplier": config.attn_output_multiplier,
        "embedding_multiplier_scale": config.embedding_multiplier_scale,
        "output_multiplier_scale": config.output_multiplier_scale,
        "pad_token_id": config.pad_token,
        "bos_token_id": config.bos_token,
        "eos_token_id": config.eos_token,
        # SGLang scales its head when it loads it, so that it needs one of its own.
        "tie_word_embeddings": names != "sglang",
        "torch_dtype": dtype,
        # For a program that makes the values int8 again, as ours does.
        "row_parallel_scale_groups": config.row_parallel_scale_groups,
    }


def differences(config: GrokConfig, names: Naming) -> tuple[str, ...]:
    """Return what a peer cannot be told of this model; of Grok-1 itself nothing."""
    notes = []
    if names != "sglang" and config.q_size != config.emb_size:
        notes.append(
            f"programs for the names of {names} take {config.emb_size // config.num_q_heads} for "
            f"the size of a head, the {config.emb_size} of the embedding shared by "
            f"{config.num_q_heads}; here it is {config.key_size}: they will refuse the shapes"
        )
    usual = config.key_size**-0.5
    if names != "keyfan" and abs(config.attn_output_multiplier / usual - 1) > 1e-6:
        notes.append(
            f"{'vLLM' if names == 'hpcai' else 'SGLang'} scales attention logits by 1/sqrt(head "
            f"size), {usual:.6g}, whatever the config says; here it is "
            f"{config.attn_output_multiplier:.6g}"
        )
    return tuple(notes)
