"""The class that Triton's Python backend calls: `model.py` of a repository imports it.

Triton calls one method at a time, in one thread. `execute` hands a request to the model and
returns; what is sent comes from other threads, which decoupled mode allows.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from export_grok.errors import ClosedError, ConfigError, ExportGrokError
from export_grok.runtime.model import Model, load
from export_grok.runtime.triton_server.answer import error_response
from export_grok.runtime.triton_server.api import Request, Utils, utils
from export_grok.runtime.triton_server.asked import read_request
from export_grok.runtime.triton_server.exchange import Exchange, send_last
from export_grok.runtime.triton_server.settings import Settings

__all__ = ["TritonPythonModel"]

# Seconds between two looks at who is still waited for, and for the last words at the end.
LOOK = 0.1
GRACE = 10.0


class TritonPythonModel:
    """A bundle under Triton, by the methods and the class name that Triton asks for."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the bundle that `config.pbtxt` names.

        Raises:
            TritonModelException: it does not load; the server shows the text.
        """
        self._utils = utils()
        try:
            self._model = _loaded(self._utils, args)
        except ExportGrokError as error:
            raise self._utils.TritonModelException(str(error)) from error
        self._texts = self._model.bundle.tokenizer is not None
        self._ready = True
        self._changed = threading.Condition()
        self._exchanges: set[Exchange] = set()
        self._closing = False
        self._watch = threading.Thread(
            target=self._look, name="export-grok cancelled requests", daemon=True
        )
        self._watch.start()

    def execute(self, requests: Sequence[Request]) -> None:
        """Begin to answer requests."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                asked = read_request(self._utils, request)
                handle = self._model.submit(
                    asked.prompt, asked.params, name=request.request_id() or None
                )
            except ExportGrokError as error:
                self._ready = self._ready and not isinstance(error, ClosedError)
                send_last(self._utils, sender, error_response(self._utils, error))
                continue
            except Exception as error:  # a mistake of ours; other requests shall not feel it
                self._utils.Logger.log_error(f"export-grok: {error!r}")
                send_last(self._utils, sender, error_response(self._utils, error))
                continue
            exchange = Exchange(
                self._utils,
                sender,
                handle,
                stream=asked.stream,
                texts=self._texts,
                ended=self._ended,
            )
            with self._changed:
                self._exchanges.add(exchange)
                self._changed.notify_all()
            exchange.start()

    def is_ready(self) -> bool:
        """Return whether requests can be answered: not once the engine has failed."""
        return self._ready

    def finalize(self) -> None:
        """Cancel what is under way, tell so, and let the model go."""
        self._ready = False
        self._model.close()
        with self._changed:
            self._closing = True
            left = list(self._exchanges)
            self._changed.notify_all()
        for exchange in left:
            exchange.join(GRACE)
        self._watch.join()

    def _ended(self, exchange: Exchange) -> None:
        with self._changed:
            self._exchanges.discard(exchange)

    def _look(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._exchanges)
                self._changed.wait_for(lambda: self._closing, LOOK)
                if self._closing:
                    return
                exchanges = list(self._exchanges)
            for exchange in exchanges:
                exchange.look()


def _loaded(utils: Utils, args: Mapping[str, str]) -> Model:
    config = json.loads(args["model_config"])
    if not config.get("model_transaction_policy", {}).get("decoupled"):
        raise ConfigError(
            "config.pbtxt has no model_transaction_policy { decoupled: true }, which streaming "
            "needs; write it again by export-grok package"
        )
    device = args.get("model_instance_device_id", "0")
    if args.get("model_instance_kind") == "GPU" and device != "0":
        raise ConfigError(
            f"config.pbtxt asks for GPU {device}; the engine takes the first that it sees: write "
            "gpus: [ 0 ], and choose it by CUDA_VISIBLE_DEVICES"
        )
    settings = Settings.of_parameters(config.get("parameters", {}))
    options = settings.load_options(Path(utils.get_model_dir()).parent)
    return load(**options)
