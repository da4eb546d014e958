"""The graphs of a bundle, whose manifest says that they are what they should be."""

import dataclasses
import json
import os
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np

from export_grok.artifacts import MANIFEST, Bundle, open_bundle
from export_grok.config import EngineOptions, ExportOptions
from export_grok.engines.ort.build import build_engine
from export_grok.engines.ort.session import open_engine
from export_grok.engines.pipeline import engine_from_source
from export_grok.errors import ExportGrokError
from export_grok.export.random_checkpoint import write_random_checkpoint
from export_grok.plugins.kernels import CHOICE, native_kernels
from scripts.fuzzing.files import Files, Odd, Placed
from scripts.fuzzing.graph_edits import edited_graph
from scripts.fuzzing.target import Case, Target
from scripts.fuzzing.targets.released import SMALL, files_below
from scripts.fuzzing.tripwire import Tripwire

__all__ = ["GraphTarget", "GraphsTarget"]

FUNCTIONS = EngineOptions(allow_functions=True)


class GraphTarget(Target):
    """The engine of a bundle: a graph is loaded and computes a step."""

    name = "graph"
    inputs: ClassVar[int] = 80
    spare: ClassVar[int] = 1 << 40  # a graph may ask for memory; the process's limit holds

    def __init__(self, folder: Path, bundle: Path | None = None) -> None:
        native_kernels()  # their library is loaded once, not by the first input
        whole = self._whole(folder, bundle)
        # All that a tensor of the bundle could want to read lies in it too.
        self._outside = folder / "outside"
        self._outside.write_bytes(bytes(max(map(len, whole.values()))))
        whole["weights/way_out"] = Odd("link", str(self._outside))
        self._right = whole
        self._tripwire = Tripwire(self._outside)
        self.placed = Placed(folder / "bundle", whole)

    def _whole(self, folder: Path, bundle: Path | None) -> dict[str, Any]:
        if bundle is None:
            config = dataclasses.replace(SMALL, key_size=8, num_q_heads=2)
            write_random_checkpoint(config, folder / "checkpoint")
            options = ExportOptions(copy_weights=True, head="int8")
            bundle = engine_from_source(
                folder / "checkpoint",
                folder / "whole",
                backend="ort",
                engine=FUNCTIONS,
                options=options,
            ).folder
        return files_below(bundle)

    def edit(self, files: Files, random: Random) -> None:
        """Change a graph; the same one as before, if one was changed."""
        graphs = sorted(name for name in files if self._is_edited(name))
        changed = [name for name in graphs if files[name] is not self.placed.whole[name]]
        name = random.choice(changed or graphs)
        content = files[name]
        assert isinstance(content, bytes)
        files[name] = edited_graph(content, random, str(self._outside))

    @staticmethod
    def _is_edited(name: str) -> bool:
        return name.endswith(".onnx") and "template" not in name

    def files_of(self, case: Case) -> Files:
        """Return the files of one input, with a manifest that says they are right."""
        files = super().files_of(case)
        changed = [name for name in files if files[name] is not self._right[name]]
        if changed:
            manifest = json.loads(self._right[MANIFEST])
            for name in set(changed) - {MANIFEST}:
                manifest["files"][name] = _record(files[name])
            files[MANIFEST] = json.dumps(manifest).encode()
        os.environ[CHOICE] = "builtin" if any(".ort." in name for name in changed) else ""
        return files

    def read(self) -> Any:
        """Open the bundle and compute the logits of three tokens."""
        bundle = open_bundle(self.folder, kind="engine")
        session = open_engine(bundle, batch=1, max_length=8, threads=1)
        tokens, start = np.array([[1, 2, 3]]), np.array([0])
        one = session.forward(tokens, start, np.array([2]))
        return bundle, one, session.forward_all(tokens, start)

    def hold(self, said: Any) -> None:
        """See that there are logits, and that nothing else was opened for them."""
        bundle, one, every = said
        assert one.shape == (1, bundle.config.vocab_size)
        assert every.shape == (1, 3, bundle.config.vocab_size)

    def told(self, error: ExportGrokError) -> bool:
        """Return whether an error says where what is wrong is: in a file, or a graph by name."""
        return super().told(error) or str(error).startswith("graph ")

    def leave(self) -> None:
        """See that nobody looked outside, whatever came of it."""
        assert not self._tripwire.touched(), "a file outside of the folder was opened"


class GraphsTarget(GraphTarget):
    """A folder of graphs: an engine is built of them."""

    name = "graphs"
    inputs: ClassVar[int] = 30

    def __init__(self, folder: Path, bundle: Path | None = None) -> None:
        super().__init__(folder, bundle)
        self.read()  # what a build imports is here from now on
        self.leave()

    def _whole(self, folder: Path, bundle: Path | None) -> dict[str, Any]:
        files = super()._whole(folder, bundle)
        manifest = json.loads(files[MANIFEST])
        for name in [name for name in files if ".ort." in name]:
            del files[name], manifest["files"][name]
        manifest |= {"kind": "graphs", "backend": None, "lowering": {}, "engine": {}}
        files[MANIFEST] = json.dumps(manifest).encode()
        return files

    def read(self) -> Bundle:
        """Build the engine."""
        return build_engine(open_bundle(self.folder), FUNCTIONS)

    def hold(self, said: Bundle) -> None:
        """See that there is one."""
        assert open_bundle(said.folder, kind="engine").manifest == said.manifest

    def leave(self) -> None:
        """Take away what was built."""
        super().leave()
        self.placed.renew()


def _record(content: Any) -> dict[str, Any]:
    import hashlib

    return {"bytes": len(content), "fingerprint": "sha256:" + hashlib.sha256(content).hexdigest()}
