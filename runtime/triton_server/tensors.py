"""Names, types and shapes of what a request and a response hold, as `config.pbtxt` declares them.

A name that the vLLM backend or TensorRT-LLM's models for Triton have means the same here. Sources:
triton-inference-server/vllm_backend at 8de0c14, src/model.py; NVIDIA/TensorRT-LLM,
triton_backend/all_models/inflight_batcher_llm/ensemble/config.pbtxt at 2a9abd9.
"""

from dataclasses import dataclass
from typing import Final

__all__ = ["INPUTS", "OUTPUTS", "Port"]


@dataclass(frozen=True)
class Port:
    """An input or an output. All have one axis, and none has to be there.

    Attributes:
        name: of the tensor.
        data_type: as Triton names it.
        parameter: of `GenerationParams` that an input is; None if it is none.
        many: whether there may be any number of values; else there is one.
    """

    name: str
    data_type: str
    parameter: str | None = None
    many: bool = False


INPUTS: Final = (
    Port("text_input", "TYPE_STRING"),
    Port("input_ids", "TYPE_INT64", many=True),
    Port("stream", "TYPE_BOOL"),
    Port("max_tokens", "TYPE_INT32", "max_new_tokens"),
    Port("temperature", "TYPE_FP32", "temperature"),
    Port("top_k", "TYPE_INT32", "top_k"),
    Port("top_p", "TYPE_FP32", "top_p"),
    Port("min_p", "TYPE_FP32", "min_p"),
    Port("repetition_penalty", "TYPE_FP32", "repetition_penalty"),
    Port("seed", "TYPE_UINT64", "seed"),
    Port("stop_words", "TYPE_STRING", "stop", many=True),
    Port("ignore_eos", "TYPE_BOOL", "ignore_eos"),
    Port("logprobs", "TYPE_INT32", "logprobs"),
)

OUTPUTS: Final = (
    Port("text_output", "TYPE_STRING"),
    Port("output_ids", "TYPE_INT64", many=True),
    Port("output_log_probs", "TYPE_FP32", many=True),
    Port("logprobs", "TYPE_STRING", many=True),
    Port("finish_reason", "TYPE_STRING"),
    Port("num_input_tokens", "TYPE_INT32"),
    Port("num_cached_tokens", "TYPE_INT32"),
    Port("num_output_tokens", "TYPE_INT32"),
)
