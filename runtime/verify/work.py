"""What a verification is to do, worked out of a bundle and the user's options, and checked."""

from collections.abc import Sequence
from dataclasses import dataclass

from export_grok.artifacts import Bundle
from export_grok.config import Dtype
from export_grok.engines.backend import open_interpreter, open_probe
from export_grok.engines.probe import Probe
from export_grok.errors import ConfigError
from export_grok.optional import require
from export_grok.runtime.verify.options import VerifyOptions
from export_grok.runtime.verify.reference import Reference, reference_of
from export_grok.runtime.verify.rows import Rows, batch_of, rows_of
from export_grok.runtime.verify.steps import Step, faint, steps_of
from export_grok.runtime.verify.tolerances import Tolerances, tolerances_of

__all__ = ["CHUNK", "Work"]

# Tokens of a row that come at once: less than a prompt, so that prompts come in pieces.
CHUNK = 16


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is compared with what.

    Attributes:
        bundle: whose engine is held to the reference.
        options: of the user.
        threads: for engines to compute with.
        reference: what is right.
        engine: runs the graphs one at a time; None if only the whole engine is compared.
        dtype: of the engine.
        floor: for an engine that is not float32, the same in its dtype with the roundings of the
            original.
        tolerances: that are allowed.
        rows: tokens that are fed.
        decoded: how many of each row singly.
        graph_steps: that are fed to graphs.
        run_steps: that are fed to the whole engine.
        max_length: slots of the caches.
    """

    bundle: Bundle
    options: VerifyOptions
    threads: int | None
    reference: Reference
    engine: Probe | None
    dtype: Dtype
    floor: Probe | None
    tolerances: Tolerances
    rows: Rows
    decoded: int
    graph_steps: tuple[Step, ...]
    run_steps: tuple[Step, ...]
    max_length: int

    @classmethod
    def of(cls, bundle: Bundle, options: VerifyOptions, threads: int | None) -> "Work":
        """Return what is meant, checked, with both sides open.

        Raises:
            BundleError: another bundle is unfinished or damaged.
            ConfigError: there is no such reference, layer or tensor, or rows do not fit.
            MissingDependencyError: torch, or what an engine needs, is not installed.
            RequestError: the text or the goldens cannot be read.
        """
        _check_layers(options.layers, bundle)
        tolerances_of(bundle.config, given=options.tolerances)  # refused before anything loads
        reference = reference_of(options.against, bundle, threads=threads)
        engine = None
        if options.interpret:
            engine = open_interpreter(bundle, threads=threads)
        elif options.graphs:
            engine = open_probe(bundle, threads=threads)
        dtype = bundle.manifest.dtype if engine is None else engine.dtype
        tolerances = tolerances_of(bundle.config, dtype, options.tolerances)
        floor = None
        if dtype != "float32":
            require("torch", extra="verify")
            from export_grok.runtime.torch_probe import TorchProbe

            floor = TorchProbe.of_bundle(bundle, dtype)
        goldens = reference.goldens
        if goldens is None:
            rows = rows_of(
                bundle,
                prompt=options.prompt,
                tokens=options.tokens,
                batch=batch_of(bundle),
                text=options.text,
            )
            decoded = options.tokens
        else:
            prompts = tuple(map(tuple, goldens.rows))
            rows = Rows(rows=prompts, source="the original program's prompts")
            decoded = goldens.decoded
        longest = max(len(row) for row in rows.rows)
        length = min(bundle.sizes.get("max_length", longest), bundle.config.sequence_len)
        if longest > length:
            raise ConfigError(
                f"rows of {longest} tokens do not fit this engine, which takes {length}; take a "
                "smaller --prompt or fewer --tokens"
            )
        run_steps = steps_of(rows.rows, decode=decoded, chunk=CHUNK, max_length=longest)
        return cls(
            bundle=bundle,
            options=options,
            threads=threads,
            reference=reference,
            engine=engine,
            dtype=dtype,
            floor=floor,
            tolerances=tolerances,
            rows=rows,
            decoded=decoded,
            graph_steps=(*run_steps, faint(run_steps[0])) if goldens is None else goldens.steps,
            run_steps=run_steps,
            max_length=longest,
        )


def _check_layers(layers: Sequence[int] | None, bundle: Bundle) -> None:
    count = bundle.config.num_layers
    beyond = [layer for layer in layers or () if layer >= count]
    if beyond:
        raise ConfigError(
            f"there is no layer {', '.join(map(str, beyond))}: {bundle.folder} has layers 0 to "
            f"{count - 1}"
        )
