"""Signature of softcap_attention; its caches are one memory each, before and after."""

from export_grok.plugins.op import Operand, OpSpec

__all__ = ["SPEC"]

SPEC = OpSpec(
    name="softcap_attention",
    op_type="GrokSoftcapAttention",
    inputs=(
        Operand(name="query", shape="B S Hq*D"),
        Operand(name="key", shape="B S Hkv*D"),
        Operand(name="value", shape="B S Hkv*D"),
        Operand(name="k_cache", shape="B Hkv T D"),
        Operand(name="v_cache", shape="B Hkv T D"),
        Operand(name="start", shape="B", dtype="int64"),
    ),
    outputs=(
        Operand(name="y", shape="B S Hq*D"),
        Operand(name="k_out", shape="B Hkv T D"),
        Operand(name="v_out", shape="B Hkv T D"),
    ),
    attributes={"num_heads": int, "kv_heads": int, "scale": float, "cap": float},
    aliases={"k_out": "k_cache", "v_out": "v_cache"},
)
