"""Every parameter of Grok-1: its name here, its shape, its dtype.

Names are the module paths of `export.model`, matrices are stored [in, out] as they were released.
"""

from dataclasses import dataclass

from export_grok.config import GrokConfig
from export_grok.weights import StoredDtype

__all__ = ["Parameter", "head_parameters", "layer_parameters", "model_parameters"]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One tensor as it must be.

    Attributes:
        groups: for an int8 matrix, how many groups of rows have scales of their own.
    """

    name: str
    dtype: StoredDtype
    shape: tuple[int, ...]
    groups: int | None = None


def layer_parameters(config: GrokConfig, layer: int) -> dict[str, Parameter]:
    """Return the parameters of one decoder layer, by name."""
    prefix = f"layers.{layer}."
    model, experts = config.emb_size, (config.num_experts,)
    row_groups = config.row_parallel_scale_groups
    norms = ("pre_attn_norm", "post_attn_norm", "pre_moe_norm", "post_moe_norm")
    return _by_name(
        *_quantised(f"{prefix}attention.query", (), model, config.q_size, 1),
        *_quantised(f"{prefix}attention.key", (), model, config.kv_size, 1),
        *_quantised(f"{prefix}attention.value", (), model, config.kv_size, 1),
        *_quantised(f"{prefix}attention.out", (), config.q_size, model, row_groups),
        *_quantised(f"{prefix}experts.gate", experts, model, config.ffn_size, 1),
        *_quantised(f"{prefix}experts.up", experts, model, config.ffn_size, 1),
        *_quantised(f"{prefix}experts.down", experts, config.ffn_size, model, row_groups),
        _float(f"{prefix}router.weight", (model, config.num_experts)),
        *(_float(f"{prefix}{norm}.scale", (model,)) for norm in norms),
    )


def model_parameters(config: GrokConfig) -> dict[str, Parameter]:
    """Return all parameters, by name. The embedding is the head too."""
    whole = _by_name(
        _float("embedding.weight", (config.vocab_size, config.emb_size)),
        _float("final_norm.scale", (config.emb_size,)),
    )
    for layer in range(config.num_layers):
        whole |= layer_parameters(config, layer)
    return whole


def head_parameters(config: GrokConfig) -> dict[str, Parameter]:
    """Return the parameters of an int8 head, by name: the matrix, and the norm before it."""
    model, vocabulary = config.emb_size, config.vocab_size
    return _by_name(
        Parameter(name="unembedding.weight", dtype="int8", shape=(model, vocabulary), groups=1),
        _float("unembedding.scales", (1, vocabulary)),
        _float("final_norm.scale", (model,)),
    )


def _float(name: str, shape: tuple[int, ...]) -> Parameter:
    return Parameter(name=name, dtype="float32", shape=shape)


def _quantised(
    name: str, lead: tuple[int, ...], rows: int, columns: int, groups: int
) -> tuple[Parameter, Parameter]:
    return (
        Parameter(
            name=f"{name}.weight", dtype="int8", shape=(*lead, rows, columns), groups=groups
        ),
        Parameter(name=f"{name}.scales", dtype="bfloat16", shape=(*lead, groups, columns)),
    )


def _by_name(*parameters: Parameter) -> dict[str, Parameter]:
    return {parameter.name: parameter for parameter in parameters}
