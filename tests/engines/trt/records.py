"""Records of plans for the fixture models, and bundles that hold them, without a build."""

from pathlib import Path

from export_grok.artifacts import WEIGHT_INDEX, Bundle
from export_grok.config import Dtype, GrokConfig, HeadDtype
from export_grok.engines.trt.record import (
    PHASES,
    Binding,
    GraphRecord,
    Phase,
    PlanRecord,
    Sizes,
    TrtRecord,
)
from export_grok.export.contract import GRAPH_KINDS, GraphKind, ports, weight_prefix
from export_grok.export.parameters import head_parameters, layer_parameters, model_parameters
from export_grok.export.partition import cut_axis, share
from export_grok.manifest import HeadError, Manifest, WeightsPlace
from tests.conftest import load_golden

__all__ = ["bundle_with", "record_for"]


def record_for(
    config: GrokConfig,
    sizes: Sizes,
    dtype: Dtype = "float32",
    *,
    head: HeadDtype = "float32",
    sms: tuple[int, ...] = (90,),
) -> TrtRecord:
    """Return what a build would record, of `tensorrt` 1.2.3."""
    graphs = tuple(
        GraphRecord(
            kind=kind,
            phase=phase,
            file=f"trt/{kind}.{phase}.onnx",
            bindings=_bindings(kind, phase, config, sizes, dtype, head),
            nodes={},
        )
        for kind in GRAPH_KINDS
        for phase in PHASES
    )
    plans = tuple(
        PlanRecord(
            kind=graph.kind,
            phase=graph.phase,
            sm=sm,
            file=f"trt/{graph.kind}.{graph.phase}.sm{sm}.plan",
        )
        for graph in graphs
        for sm in sms
    )
    return TrtRecord(
        module="tensorrt",
        version="1.2.3",
        sizes=sizes,
        graphs=graphs,
        plans=plans,
        kernels={},
        recipe="",
    )


def bundle_with(
    record: TrtRecord,
    name: str,
    folder: Path,
    dtype: Dtype = "float32",
    *,
    int8_head: bool = False,
) -> Bundle:
    """Write what a session reads of the bundle of a fixture model: the weight index."""
    golden = load_golden(name)
    folder.mkdir(parents=True, exist_ok=True)
    golden.index.write(folder / WEIGHT_INDEX)
    manifest = Manifest(
        kind="engine",
        backend="trt",
        config=golden.config,
        dtype=dtype,
        head="int8" if int8_head else "float32",
        head_error=HeadError(relative=0.0, largest=0.0) if int8_head else None,
        weights=WeightsPlace(copied=False, relative="", absolute=str(golden.folder)),
        source={},
        versions={},
        files={},
        weight_files={},
        ports={},
        lowering={},
        engine=record.to_dict(),
    )
    return Bundle(folder=folder, weights_root=golden.index.root, manifest=manifest)


def _bindings(
    kind: GraphKind,
    phase: Phase,
    config: GrokConfig,
    sizes: Sizes,
    dtype: Dtype,
    head: HeadDtype,
) -> tuple[Binding, ...]:
    ranks = sizes.tensor_parallel
    batch, tokens = sizes.rows(phase)
    lengths = {"B": batch, "S": tokens, "T": sizes.slots}
    own = [
        Binding(
            name=port.name,
            direction=port.direction,
            shape=tuple(lengths[axis] if isinstance(axis, str) else axis for axis in port.shape),
            dtype=port.dtype,
            aliases=port.aliases,
        )
        for port in ports(kind, config, dtype, ranks)
    ]
    weights = []
    if kind == "layer":
        parameters = layer_parameters(config, 0)
    elif kind != "embedding" and head == "int8":
        parameters = head_parameters(config)
    else:
        names = {"embedding.weight"} | (set() if kind == "embedding" else {"final_norm.scale"})
        parameters = {name: model_parameters(config)[name] for name in sorted(names)}
    for name, parameter in parameters.items():
        short = name.removeprefix(weight_prefix(kind, 0))
        cut = cut_axis(name.removeprefix("layers.0."), parameter.shape, config.for_rank(ranks))
        weights.append(
            Binding(
                name=short,
                direction="in",
                shape=share(parameter.shape, cut, ranks),
                dtype=dtype if name == "embedding.weight" else parameter.dtype,
                weight=short,
                cut=cut,
            )
        )
    inputs = [row for row in own if row.direction == "in"]
    return (*inputs, *weights, *(row for row in own if row.direction == "out"))
